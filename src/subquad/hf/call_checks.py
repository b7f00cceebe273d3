"""Checks of the calls of a swapped model, made once per model, before any of its attention runs.

Two mistakes are seen here alone:

another implementation    a library or a helper wrote another attention into the config since the swap, so that no
                          swapped layer would run, and nothing would be reported
attention weights         the model is asked for them, but does not pass the request to its attention, and would return
                          an empty tuple

Each transformers model that contains swapped layers is checked, because each of them can be called alone. The checks
are in `forward` of the models' classes, and act for swapped models alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from transformers import PreTrainedConfig, PreTrainedModel

from subquad.core.forward_hooks import FIRST, run_first
from subquad.hf.forward_wrappers import Forward, ForwardMark, positional_names
from subquad.hf.layers import ATTACHED, NAME, Attached

CHECKS = "_subquad_checks"  # on a checked model: its `Checks`
CALL = "_subquad_call"  # on a checked model: what calls `forward`, if it changes the arguments
_UNCHECKED: ContextVar[bool] = ContextVar("unchecked", default=False)
_CHECKED = "_subquad_checked"  # on the `forward` of a class: it runs the checks
NO_WEIGHTS = (
    "asks for attention weights, which no method here returns; ask a model that is not swapped (sq.hf.restore), or use "
    "`subquad inspect`, which shows the keys that a method chooses"
)


def check_calls(model: PreTrainedModel) -> None:
    """Check every call of this model, and of the models in it, that contain swapped layers."""
    for part in _swapped_models(model):
        Checks(type(part), (next(_attached(part)).implementation, _owners(part))).put(part, CHECKS)


def stop_checking(model: nn.Module) -> None:
    """Remove what `check_calls` and `run_before_call` added."""
    for module in model.modules():
        for name in (CHECKS, FIRST):
            vars(module).pop(name, None)


def run_before_call(model: PreTrainedModel, action: Callable[[Any], None]) -> None:
    """Run an action on a model before its next forward pass, and again before later ones until it removes itself."""
    Action(type(model), action).put(model, FIRST)


def is_unchecked() -> bool:
    """True if this thread is inside a block of `unchecked`."""
    return _UNCHECKED.get()


@contextmanager
def unchecked(model: nn.Module) -> Iterator[None]:
    """Run a model inside the block with another attention on purpose, with the arguments as they are."""
    removed: dict[nn.Module, dict[str, Any]] = {}
    for module in model.modules():
        removed[module] = {name: vars(module).pop(name) for name in (CHECKS, CALL) if name in vars(module)}
    token = _UNCHECKED.set(True)
    try:
        yield
    finally:
        _UNCHECKED.reset(token)
        for module, added in removed.items():
            vars(module).update(added)


def refuse_other_implementations(model: nn.Module) -> None:
    """Raise ValueError if a config names another attention than when methods were swapped in; names the first layer."""
    for part in model.modules():
        if CHECKS in vars(part):
            _refuse_another(part)


def refuse_weights(configs: list[tuple[PreTrainedConfig, nn.Module]]) -> None:
    """Raise ValueError if a config of a model makes it return attention weights in every call; `configs_of` lists them.

    A loop over them in `swap` itself would keep a config in a variable, as if it was in use outside of the model, and
    `parts.separate` would search all objects for a module that has it.
    """
    for config, _ in configs:
        refuse_weights_of(config)


def refuse_weights_of(config: PreTrainedConfig) -> None:
    """Raise ValueError if a config makes its model return attention weights in every call."""
    if config.output_attentions:
        raise ValueError(f"output_attentions=True in the {type(config).__name__} {NO_WEIGHTS}")


def _checked(forward: Forward) -> Forward:
    """The forward pass of a class that checks the calls of its swapped models."""

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        run_first(self)
        if getattr(self, CHECKS, None) is not None:
            _check(self, args, kwargs)
        call: Callable[..., Any] | None = getattr(self, CALL, None)
        return forward(self, *args, **kwargs) if call is None else call(forward, self, args, kwargs)

    return checked


class Checks(ForwardMark):
    """A mark of a model whose parts are checked in each call: `(implementation, owners)`.

    `implementation` is the name that its config has, and those of `owners`: modules in it with a config that is not the
    config of a checked model.
    """

    on_forward, wrapper = _CHECKED, staticmethod(_checked)


class Action(ForwardMark):
    """A mark of a model whose `forward` calls this function."""

    on_forward, wrapper = _CHECKED, staticmethod(_checked)

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.value(*args)


def _check(module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError for a call that would run another attention, or asks for weights."""
    if is_compiling():
        _refuse_another(module)
        refuse_weights_of(module.config)
    else:
        settings = object.__getattribute__(module.config, "__dict__")  # configs look up each attribute in Python code
        implementation, owners = module.__dict__[CHECKS].value
        if settings["_attn_implementation_internal"] != implementation or owners:
            _refuse_another(module)
        if settings["_output_attentions"]:
            refuse_weights_of(module.config)
    if len(args) > 1:  # the first is what the model reads
        kwargs = arguments_by_name(module, args, kwargs)
    for name in kwargs:
        if name.endswith("attentions") and name.startswith("output_") and kwargs[name] and not _for_timestamps(module):
            raise ValueError(f"{name}=True {NO_WEIGHTS}")


def arguments_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass by their names."""
    return {**dict(zip(positional_names(type(module).forward), args, strict=False)), **kwargs} if args else kwargs


def _refuse_another(module: nn.Module) -> None:
    implementation, owners = getattr(module, CHECKS).value
    for owner in (module, *owners):
        chosen = owner.config._attn_implementation
        if chosen == implementation:
            continue
        if _for_timestamps(module):  # which transformers makes with eager attention: see `word_timestamps`
            owner.config._attn_implementation = implementation
            continue
        layer = next(_attached(module))
        since = "sq.hf.swap" if implementation == ATTACHED else f"attn_implementation={implementation!r}"
        raise ValueError(
            f"layer {layer.label} of this {type(module).__name__} runs {str(layer.bound.method)!r} since {since}, but "
            f"attn_implementation={chosen!r} was set since, by which its own attention would run: call "
            "sq.hf.restore(model) if that is meant, or sq.hf.swap again"
        )


def _attached(module: nn.Module) -> Iterator[Attached]:
    return (part for part in module.modules() if isinstance(part, Attached))


def _for_timestamps(module: nn.Module) -> bool:
    return any(layer.for_timestamps for layer in _attached(module))


def _swapped_models(model: nn.Module) -> list[PreTrainedModel]:
    models = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return [part for part in models if any(True for _ in _attached(part))]


def _owners(model: PreTrainedModel) -> list[nn.Module]:
    """One swapped module for each config in a model that none of the models in it has."""
    known = {id(part.config) for part in _swapped_models(model)}
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        if NAME in module._modules and id(getattr(module, "config", model.config)) not in known:
            owners.setdefault(id(module.config), module)
    return list(owners.values())
