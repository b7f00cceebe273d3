"""A part of a model, such as Whisper's encoder, gets configs of its own while it is swapped.

transformers reads the name of the attention from the config of each attention module, and from that of whatever makes
masks. Parts of one model often have the same config object (the encoder and the decoder of Whisper, BART, Marian), and
so have models that were made from one config: a name that is written there would change all of them.
"""

import copy
import gc
import sys
from collections import Counter
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from subquad.hf.layers import NAME, uses_interface
from subquad.hf.saved import KEY, SHARED, asks_for_ours, configs_of
from subquad.hf.trial import ORIGINAL

_OF_SWAPS = (NAME, KEY, "_attn_implementation_internal")


class Shared(NamedTuple):
    """A config that a part shares when it is not swapped, and the settings of the part's copy when it was made."""

    config: PreTrainedConfig
    copied: dict[str, Any]


def separate(model: nn.Module) -> None:
    """Give a model copies of its configs if modules outside of it read one of them; `give_back` undoes this."""
    configs = [config for config, _ in configs_of(model)]
    if not _referred_to_outside(model, configs) or not _read_outside(model, configs):
        return
    gc.collect()  # so that modules that nothing holds any more do not count
    if not _read_outside(model, configs):
        return
    memo: dict[int, Any] = {}  # one for all, so that a config in a config stays the one that its own part has
    copies = {id(config): copy.deepcopy(config, memo) for config in configs}
    shared = {id(config): Shared(config, _settings(config)) for config in configs}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                vars(module).setdefault(SHARED, {}).setdefault(name, shared[id(value)])
                setattr(module, name, copies[id(value)])
        if ORIGINAL in vars(module):
            originals = vars(module)[ORIGINAL]
            vars(module)[ORIGINAL] = [(copies.get(id(config), config), original) for config, original in originals]


def give_back(model: nn.Module) -> None:
    """Give a model its shared configs again, except those that ask for our attention, which others still run.

    What was changed in the model's copy of a config since, as longer positions are, is changed in the shared one.
    """
    for module in model.modules():
        shared = vars(module).get(SHARED, {})
        for name, (config, copied) in list(shared.items()):
            if asks_for_ours(config):
                continue
            for key, value in _settings(getattr(module, name)).items():
                if key not in copied or value != copied[key]:
                    setattr(config, key, value)
            setattr(module, name, config)
            del shared[name]
        if not shared:
            vars(module).pop(SHARED, None)


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    """A config's own settings, without configs inside of it and without what a swap writes."""
    return {
        key: copy.deepcopy(value)
        for key, value in vars(config).items()
        if key not in _OF_SWAPS and not isinstance(value, PreTrainedConfig)
    }


def _referred_to_outside(model: nn.Module, configs: list[PreTrainedConfig]) -> bool:
    """True if anything but the modules and configs of a model refers to one of its configs, by counts of references.

    It takes microseconds, and spares most models the search of `_read_outside` through all objects that exist.
    """
    sample = object()  # this name refers to it as the list `configs` does to a config
    references = Counter(id(value) for module in model.modules() for value in vars(module).values())
    references.update(id(value) for config in configs for value in vars(config).values())
    records = {id(record): record for module in model.modules() if (record := vars(module).get(ORIGINAL))}
    references.update(id(config) for record in records.values() for config, _ in record)
    counts = [(id(x), sys.getrefcount(x)) for x in [*configs, sample]]
    ours = counts.pop()[1]
    return any(count != ours + references[number] for number, count in counts)


def _read_outside(model: nn.Module, configs: list[PreTrainedConfig]) -> bool:
    """True if an attention layer outside of a model, or another model that does not contain it, has one of its configs.

    A module does not know what contains it, so this looks through all modules that exist.
    """
    inside, wanted = set(map(id, model.modules())), set(map(id, configs))
    for thing in gc.get_objects():
        if not issubclass(type(thing), nn.Module) or id(thing) in inside:
            continue
        attributes = vars(thing)
        if any(id(shared.config) in wanted for shared in attributes.get(SHARED, {}).values()):
            return True
        if id(attributes.get("config")) in wanted and (uses_interface(thing) or _is_apart(thing, model)):
            return True
    return False


def _is_apart(other: nn.Module, model: nn.Module) -> bool:
    """True if another model neither is in this one nor contains it."""
    return isinstance(other, PreTrainedModel) and all(part is not model for part in other.modules())
