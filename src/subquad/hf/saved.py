"""Models that were saved while swapped, so that they never load with another attention silently.

A swap writes `attn_implementation: SAVED_AS` into the model's config, which `save_pretrained` keeps next to the record
of the methods where a method runs in the model or in a part of it; a swapped model that was since set to another
attention is not saved (`call_checks`). Whatever loads the folder then asks transformers for the attention of that name:

where `subquad.hf` is not imported    there is none: loading raises an error that quotes the name, which is the remedy
where it is                           `from_pretrained` returns the model with its methods attached again; where they
                                      cannot be attached it warns, and the model's first forward pass raises; a record
                                      of another number of layers is refused
where the name was removed            the same, with a warning
where `attn_implementation` is given  the model comes with that attention, like any other

A model whose method was asked for by name (`by_name`) is saved with this name, and without a record.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from subquad.hf.attention_names import SAVED_AS, names_method
from subquad.hf.call_checks import refuse_other_implementations
from subquad.hf.layers import ATTACHED, NAME, Attached, attached_to, uses_interface
from subquad.hf.positions import extend_as_recorded, with_record
from subquad.hf.swap_record import OtherLayers, read_record, record_with_parts
from subquad.methods.core.plugins import record_of

Reattach = Callable[[PreTrainedModel], Any]

KEY = "attn_implementation"
SHARED = "_subquad_shared"  # on a module of a separated part: {attribute: the config that it has when not swapped}


def configs_of(model: nn.Module) -> list[tuple[PreTrainedConfig, nn.Module]]:
    """Every config in the model with the first module that has it, outermost first."""
    configs: dict[int, tuple[PreTrainedConfig, nn.Module]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs.setdefault(id(config), (config, module))
    return list(configs.values())


def mark(model: nn.Module, name: str = SAVED_AS) -> None:
    """Write a name of subquad's attention into the configs of this model and its parts."""
    for config, _ in configs_of(model):
        setattr(config, KEY, name)


def unmark(model: nn.Module) -> None:
    """Remove everything that a swap wrote from the model's configs."""
    for config, _ in configs_of(model):
        unmark_config(config)


def unmark_config(config: PreTrainedConfig) -> None:
    """Remove everything that a swap wrote from one config."""
    for key in (KEY, NAME):
        vars(config).pop(key, None)


def without_marks(settings: dict[Any, Any]) -> dict[Any, Any]:
    """A config as a dict, without what a swap wrote into it and into the configs inside of it."""
    return {
        key: without_marks(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if key not in (KEY, NAME)
    }


def is_ours(implementation: Any) -> bool:
    """True if this is a name of subquad's attention."""
    return implementation in (ATTACHED, SAVED_AS) or names_method(implementation)


def asks_for_ours(config: PreTrainedConfig) -> bool:
    """True if this config names subquad's attention."""
    return is_ours(config._attn_implementation)


def asks_for_method(config: PreTrainedConfig) -> bool:
    """True if this config asks for a method by its name: see `by_name`."""
    return names_method(config._attn_implementation)


def asks_for_swap(config: PreTrainedConfig) -> bool:
    """True if this config is that of a swapped model, or of a saved one."""
    return asks_for_ours(config) and not asks_for_method(config)


def default_implementation(owner: nn.Module, model: nn.Module) -> str:
    """The attention that transformers gives a part of a model when none is asked for: SDPA where it can, or eager."""
    part = owner if isinstance(owner, PreTrainedModel) else model
    return part.get_correct_attn_implementation(None) if isinstance(part, PreTrainedModel) else "sdpa"


# ---------------------------------------------------------------------- `save_pretrained` and `from_pretrained`


def keep_swaps_in_files(reattach: Reattach) -> None:
    """Make transformers models save their swapped methods and longer positions, and have them when loaded."""
    load, save = PreTrainedModel.from_pretrained.__func__, PreTrainedModel.save_pretrained

    @functools.wraps(load)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        named = [kwargs.get(KEY), getattr(kwargs.get("config"), "_attn_implementation", None)]
        try:
            loaded = load(cls, *args, **kwargs)
        except (AttributeError, TypeError):
            _refuse_unnamed(args, kwargs)
            raise
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        extend_as_recorded(model)  # first: learned parameters may depend on the longest input
        _attach(model, reattach, is_named=any(name is not None for name in named))
        return loaded

    @functools.wraps(save)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        refuse_other_implementations(self)
        with _saying_what_runs(self), with_record(self):
            return save(self, *args, **kwargs)

    PreTrainedModel.from_pretrained, PreTrainedModel.save_pretrained = classmethod(from_pretrained), save_pretrained


@contextmanager
def _saying_what_runs(model: PreTrainedModel) -> Iterator[None]:
    """The model's configs with what runs while they are written: the name of our attention and records, or neither."""
    configs = configs_of(model)
    before = [
        (vars(config), {key: vars(config)[key] for key in (KEY, NAME) if key in vars(config)}) for config, _ in configs
    ]
    named = _named_for_files(model)
    ours = asks_for_swap(model.config) or any(
        attached is not None and attached.implementation == ATTACHED for attached in map(attached_to, model.modules())
    )
    if ours and named is not None:
        raise ValueError(
            f"a part of this {type(model).__name__} was swapped by sq.hf.swap, and another has its method by "
            "attn_implementation, which are not saved together: use sq.hf.swap for both"
        )
    record, parts = _current_record(model), _records_of_parts(model) if ours else {}
    try:
        for config, _ in configs:
            vars(config).pop(KEY, None)
            if not asks_for_swap(config):
                vars(config).pop(NAME, None)
        if named is not None:
            vars(model.config)[KEY] = named
        if ours:
            mark(model)
            if parts or record is not None:
                vars(model.config)[NAME] = record_with_parts(record, parts) if parts else record
        yield
    finally:
        for settings, values in before:
            for key in (KEY, NAME):
                settings.pop(key, None)
            settings.update(values)


def _named_for_files(model: PreTrainedModel) -> Any:
    """The saved config's `attn_implementation` for methods that were asked for by name; None: none were.

    Raises:
        ValueError: a part's config is not written with the model's, and asks for something else.
    """
    if not any(asks_for_method(config) for config, _ in configs_of(model)):
        return None
    written: set[int] = set()
    named = _names_in(model.config, written)
    names = [(name, part) for name, part in model.named_modules() if isinstance(part, PreTrainedModel)]
    for name, part in names:
        if id(part.config) not in written and part.config._attn_implementation != model.config._attn_implementation:
            raise ValueError(
                f"the part {name!r} of this {type(model).__name__} has "
                f"attn_implementation={part.config._attn_implementation!r} in a config that is not saved with the "
                f"model's, which has {model.config._attn_implementation!r}: use sq.hf.swap(part, method), which is "
                "saved, or give all parts the same name"
            )
    return named


def _names_in(config: PreTrainedConfig, written: set[int]) -> Any:
    """The attention of a config and of the configs in it, as `attn_implementation` takes it: a name, or a dict."""
    written.add(id(config))
    name = config._attn_implementation
    inside = {key: getattr(config, key, None) for key in config.sub_configs}
    parts = {key: _names_in(part, written) for key, part in inside.items() if isinstance(part, PreTrainedConfig)}
    return name if all(part == name for part in parts.values()) else {"": name, **parts}


def _records_of_parts(model: PreTrainedModel) -> dict[str, Any]:
    """The records of swapped parts with configs of their own, which are not written with the model's: {name: record}.

    None: the part runs its own attention, though the model around it is swapped.
    """
    whole, known, records = NAME in vars(model.config), {id(model.config)}, {}
    for name, part in model.named_modules():
        if not isinstance(part, PreTrainedModel) or id(part.config) in known:
            continue
        known.add(id(part.config))
        record, separated = _current_record(part), SHARED in vars(part)
        if (record and (whole or separated)) or (whole and separated):
            records[name] = record
    return records


def _current_record(model: PreTrainedModel) -> Any:
    """The record in a model's config; of the layers as they are, if some were removed or moved after the swap."""
    plain = vars(model.config).get(NAME)
    modules = [module for module in model.modules() if uses_interface(module)]
    methods = {
        number: module._modules[NAME].bound.method for number, module in enumerate(modules) if NAME in module._modules
    }
    if not isinstance(plain, dict) or not methods:
        return plain
    recorded = plain.get("methods", {})
    is_as_recorded = all(recorded.get(str(number)) == record_of(method) for number, method in methods.items())
    if plain.get("layers") == len(modules) and is_as_recorded:
        return plain
    try:
        record = read_record(plain, model.config)
    except ValueError:  # it is damaged, as loading the model will say
        return plain
    # What a plan measured was measured with all layers, in their order.
    return replace(record, layers=len(modules), methods=methods, floor=None, verified=None).to_dict()


def _refuse_unnamed(args: Any, kwargs: dict[str, Any]) -> None:
    """Raise ValueError if the config that could not be loaded names an attention by something that is not a name."""
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        name, recorded = config._attn_implementation, NAME in vars(config)
    else:
        folder = next(
            (x for x in (config, kwargs.get("pretrained_model_name_or_path"), *args[:1]) if x is not None), None
        )
        plain = {} if folder is None else PreTrainedConfig.get_config_dict(folder)[0]
        name, recorded = plain.get(KEY), NAME in plain
    if recorded and not isinstance(name, str | dict | None):
        raise ValueError(f"{KEY} in the config is {name!r}, but it must be a name; {_REPAIR}")


_REPAIR = (
    "give attn_implementation='sdpa' to load the model with its own exact attention, and swap methods into that "
    "(sq.hf.swap, or sq.hf.reattach for those that its config records)"
)


def _attach(model: PreTrainedModel, reattach: Reattach, *, is_named: bool) -> None:
    """Attach what a loaded model's config records; where that fails, warn and leave it without any attention.

    `is_named`: whether a caller, or the config, named an attention.
    """
    if any(isinstance(part, Attached) for part in model.modules()):
        return
    if not asks_for_swap(model.config):
        by_name = any(asks_for_method(config) for config, _ in configs_of(model))
        if is_named or by_name or not any(isinstance(vars(config).get(NAME), dict) for config, _ in configs_of(model)):
            return
        warnings.warn(
            f"the config of {model.name_or_path or type(model).__name__} records swapped methods, but names no "
            f"attention any more ({KEY} was removed or changed); the methods are attached. If exact attention is "
            f"meant, {_REPAIR}",
            stacklevel=4,
        )
    mark(model)  # transformers took it out of the config
    swapped = _swapped_parts(model)
    inside = {id(config) for part in swapped for config, _ in configs_of(part)}
    for config, owner in configs_of(model):
        if id(config) not in inside:
            config._attn_implementation_internal = default_implementation(owner, model)
    try:
        for part in swapped:
            reattach(part)
    except OtherLayers as error:
        raise OtherLayers(f"{model.name_or_path or type(model).__name__}: {error}; {_REPAIR}") from None
    except ValueError as error:
        warnings.warn(
            f"{model.name_or_path or type(model).__name__} was saved with its attention swapped, and its methods could "
            f"not be attached again: {error}; its forward pass raises an error until a method is attached",
            stacklevel=4,
        )


def _swapped_parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The parts whose configs record a swap, or the whole model where it does, or where none does."""
    if hasattr(model.config, NAME):
        return [model]
    parts: dict[int, PreTrainedModel] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and hasattr(part.config, NAME):
            parts.setdefault(id(part.config), part)
    return list(parts.values()) or [model]
