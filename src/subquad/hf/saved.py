"""Models that were saved while swapped: no library loads them with another attention without a word.

A swap writes `attn_implementation: SAVED_AS` into the model's config, which `save_pretrained` keeps beside the record of
the methods. Whatever loads the folder asks transformers for the attention of that name:

where `subquad.hf` is not imported    there is none, so that loading raises an error, which quotes the name: the remedy
where it is                           `from_pretrained` returns the model with its methods attached again; where they
                                      cannot be attached it warns, and the model's first forward pass raises
where `attn_implementation` is given  the model comes with that attention, as any other
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from subquad.hf.layers import NAME, Attached

# Part of what is in files: never change it. Not in it, because transformers reads them out of names: sdpa, flash, flex.
SAVED_AS = (
    "subquad: this model was saved with its attention swapped; run `import subquad.hf` before loading it (pip install "
    "'subquad[hf]'), or give another attn_implementation to load it with its own exact attention"
)
_KEY = "attn_implementation"


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config in the model, outermost first, each once."""
    configs: dict[int, PreTrainedConfig] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs.setdefault(id(config), config)
    return list(configs.values())


def mark(model: nn.Module) -> None:
    """Let what is saved of this model, or of a part of it, name our attention."""
    for config in configs_of(model):
        setattr(config, _KEY, SAVED_AS)


def unmark(model: nn.Module) -> None:
    """Let what is saved of this model load with its own attention."""
    for config in configs_of(model):
        vars(config).pop(_KEY, None)


def asks_for_ours(config: PreTrainedConfig) -> bool:
    """Whether this config sets our attention, as a swap or a loaded file does."""
    return config._attn_implementation in (NAME, SAVED_AS)


def leave_ours(model: nn.Module) -> None:
    """Set every part that is left on our attention to what transformers would give it: SDPA, or else eager."""
    for part in model.modules():
        config = getattr(part, "config", None)
        if isinstance(config, PreTrainedConfig) and asks_for_ours(config):
            owner = part if isinstance(part, PreTrainedModel) else model
            # Not `_attn_implementation`, which would set the configs inside of this one too.
            config._attn_implementation_internal = owner.get_correct_attn_implementation(None)


def attach_when_loaded(reattach: Callable[[PreTrainedModel], Any]) -> None:
    """Let `from_pretrained` of every transformers model attach what was saved, with `reattach`."""
    load = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    @functools.wraps(load)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        loaded = load(cls, *args, **kwargs)
        _attach(loaded[0] if isinstance(loaded, tuple) else loaded, reattach)
        return loaded

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _attach(model: PreTrainedModel, reattach: Callable[[PreTrainedModel], Any]) -> None:
    if not asks_for_ours(model.config) or any(isinstance(part, Attached) for part in model.modules()):
        return
    mark(model)  # transformers took the key out of the config: what is saved of this model has it again
    try:
        reattach(model)
    except ValueError as error:
        warnings.warn(
            f"{model.name_or_path or type(model).__name__} was saved with its attention swapped, and the methods could "
            f"not be attached again: {error}; until one is, its forward pass raises an error",
            stacklevel=4,
        )
