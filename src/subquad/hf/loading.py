"""`save_pretrained` and `from_pretrained` of transformers' models, which know of swapped attention from here on.

Saving writes `attn_implementation: SAVED_AS` where a method runs in the model or in a part of it, and does not where a
swapped model was since set to another attention. Loading attaches what was saved under that name (see `saved`).
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from subquad.hf.layers import NAME, Attached, attached_to
from subquad.hf.saved import KEY, asks_for_ours, configs_of, default_implementation, mark

Reattach = Callable[[PreTrainedModel], Any]


def keep_swaps_in_files(reattach: Reattach) -> None:
    """Let every transformers model say what runs in it when it is saved, and attach that when it is loaded."""
    load, save = PreTrainedModel.from_pretrained.__func__, PreTrainedModel.save_pretrained

    @functools.wraps(load)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        loaded = load(cls, *args, **kwargs)
        _attach(loaded[0] if isinstance(loaded, tuple) else loaded, reattach)
        return loaded

    @functools.wraps(save)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        with _saying_what_runs(self):
            return save(self, *args, **kwargs)

    PreTrainedModel.from_pretrained, PreTrainedModel.save_pretrained = classmethod(from_pretrained), save_pretrained


@contextmanager
def _saying_what_runs(model: PreTrainedModel) -> Iterator[None]:
    """The model's configs with the name of our attention while they are written, or without it."""
    ours = asks_for_ours(model.config) or any(attached_to(part) is not None for part in model.modules())
    before = [(vars(config), vars(config).get(KEY)) for config, _ in configs_of(model)]
    try:
        for settings, _ in before:
            settings.pop(KEY, None)
        if ours:
            mark(model)
        yield
    finally:
        for settings, name in before:
            settings.pop(KEY, None)
            if name is not None:
                settings[KEY] = name


def _attach(model: PreTrainedModel, reattach: Reattach) -> None:
    """Attach what a loaded model's config records; where that fails, warn and leave it without any attention."""
    if not asks_for_ours(model.config) or any(isinstance(part, Attached) for part in model.modules()):
        return
    mark(model)  # transformers took it out of the config
    swapped = _swapped_parts(model)
    inside = {id(config) for part in swapped for config, _ in configs_of(part)}
    for config, owner in configs_of(model):
        if id(config) not in inside:
            config._attn_implementation_internal = default_implementation(owner, model)
    try:
        for part in swapped:
            reattach(part)
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
    found: dict[int, PreTrainedModel] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and hasattr(part.config, NAME):
            found.setdefault(id(part.config), part)
    return list(found.values()) or [model]
