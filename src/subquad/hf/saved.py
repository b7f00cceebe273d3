"""Models that were saved while swapped: nothing loads them with another attention without a word.

A swap writes `attn_implementation: SAVED_AS` into the model's config, which `save_pretrained` keeps beside the record
of the methods. Whatever loads the folder (see `loading`) then asks transformers for the attention of that name:

where `subquad.hf` is not imported    there is none: loading raises an error that quotes the name, which is the remedy
where it is                           `from_pretrained` returns the model with its methods attached again; where they
                                      cannot be attached it warns, and the model's first forward pass raises
where `attn_implementation` is given  the model comes with that attention, like any other
"""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from subquad.hf.layers import NAME

# It is in files: never change it. It may not name sdpa, flash or flex, which transformers looks for in names.
SAVED_AS = (
    "subquad: this model was saved with its attention swapped; run `import subquad.hf` before loading it (pip install "
    "'subquad[hf]'), or give another attn_implementation to load it with its own exact attention"
)
KEY = "attn_implementation"


def configs_of(model: nn.Module) -> list[tuple[PreTrainedConfig, nn.Module]]:
    """Every config in the model with the first module that has it, outermost first."""
    configs: dict[int, tuple[PreTrainedConfig, nn.Module]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            configs.setdefault(id(config), (config, module))
    return list(configs.values())


def mark(model: nn.Module) -> None:
    """Let what is saved of this model, or of a part of it, name our attention."""
    for config, _ in configs_of(model):
        setattr(config, KEY, SAVED_AS)


def unmark(model: nn.Module) -> None:
    """Take everything that a swap wrote out of the model's configs."""
    for config, _ in configs_of(model):
        for key in (KEY, NAME):
            vars(config).pop(key, None)


def without_marks(settings: dict[Any, Any]) -> dict[Any, Any]:
    """A config as a dict, without what a swap wrote into it and into the configs inside of it."""
    return {
        key: without_marks(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if key not in (KEY, NAME)
    }


def asks_for_ours(config: PreTrainedConfig) -> bool:
    """Whether this config names our attention, as a swap or a loaded file does."""
    return config._attn_implementation in (NAME, SAVED_AS)


def default_implementation(owner: nn.Module, model: nn.Module) -> str:
    """The attention that transformers gives a part of a model when none is asked for: SDPA where it can, or eager."""
    part = owner if isinstance(owner, PreTrainedModel) else model
    return part.get_correct_attn_implementation(None) if isinstance(part, PreTrainedModel) else "sdpa"
