"""Leave a module exactly as it was, whatever is done with it."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from subquad.nn import restore as restore_layers
from subquad.tools.measure.module_calls import holds_transformers_model

_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Run a module in eval mode with its own attention inside; afterwards it is what it was, also after an error.

    Of every module in it, and of the configs of transformers models: attributes, submodules, parameters, hooks, the
    mode, swapped methods with what they learned, and the values of buffers. Objects keep their identity.
    """
    holders = [vars(each) for each in [*module.modules(), *_configs(module)]]
    before = [(attributes, _copies(attributes)) for attributes in holders]
    modes = [(part, part.training) for part in module.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        restore_layers(module)
        if holds_transformers_model(module):
            from subquad import hf

            hf.restore(module)
        module.eval()
        yield
    finally:
        for attributes, copies in before:
            _put_back(attributes, copies)
        for part, training in modes:
            if part.training != training:  # of scripted modules, which have no such attribute in Python
                part.training = training
        with torch.no_grad():
            for buffer, values in buffers:
                if not buffer.is_meta and not torch.equal(buffer, values):
                    buffer.copy_(values)


def _copies(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Every attribute, with a copy of its members where it is a container."""
    return {name: (value, value.copy() if type(value) in _CONTAINERS else None) for name, value in attributes.items()}


def _put_back(attributes: dict[str, Any], copies: dict[str, tuple[Any, Any]]) -> None:
    for name in attributes.keys() - copies.keys():
        del attributes[name]
    for name, (value, members) in copies.items():
        attributes[name] = value
        if isinstance(value, list) and members is not None:
            value[:] = members
        elif members is not None:
            value.clear()
            value.update(members)


def _configs(module: nn.Module) -> list[Any]:
    """The configs of the transformers models in a module, those inside of others included."""
    if not holds_transformers_model(module):
        return []
    from transformers import PreTrainedConfig

    configs: dict[int, Any] = {}
    pending = [value for part in module.modules() for value in vars(part).values()]
    while pending:
        value = pending.pop()
        if isinstance(value, PreTrainedConfig) and id(value) not in configs:
            configs[id(value)] = value
            pending += vars(value).values()
    return list(configs.values())
