"""The learned parameters of a layer as some of its heads have them.

A module of learned parameters lists the tensors, or modules of tensors, with one row per head along their first axis,
in `by_query_head` and `by_key_head`. Every parameter is named; one with a single row is that of all heads. `counters`
are buffers that count forward passes in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy

import torch
from torch import Tensor, nn

from subquad.methods.core.head_subset import Heads

Pick = Callable[[Tensor], Tensor]


def some_heads(module: nn.Module, heads: Heads) -> nn.Module:
    """The module of these heads: gradients go to the parameters of the whole one, and its counters are the same."""
    keys = list(heads.keys)

    def of_keys(x: Tensor) -> Tensor:
        return x if len(x) == 1 else x[keys]

    picks: dict[str, Pick] = dict.fromkeys(getattr(module, "by_query_head", ()), lambda x: x[heads.queries])
    picks |= dict.fromkeys(getattr(module, "by_key_head", ()), of_keys)
    return _view(module, picks.get, lambda child: some_heads(child, heads))


def _view(module: nn.Module, picks: Callable[[str], Pick | None], other: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A copy whose tensors are what is picked of the module's, and those without a pick the same."""
    view = copy(module)
    for kind in ("_parameters", "_buffers"):
        tensors = {name: (x, picks(name)) for name, x in getattr(module, kind).items()}
        chosen = {name: x if x is None or pick is None else pick(x) for name, (x, pick) in tensors.items()}
        view.__dict__[kind] = chosen  # not by attributes, which accept parameters only
    children = {}
    for name, child in module._modules.items():
        pick = picks(name)
        children[name] = child if child is None else other(child) if pick is None else _all(child, pick)
    view.__dict__["_modules"] = children
    return view


def _all(module: nn.Module, pick: Pick) -> nn.Module:
    return _view(module, lambda name: pick, lambda child: _all(child, pick))


def undeclared(module: nn.Module) -> str | None:
    """The name of a parameter without a declared axis of heads; None if there is none."""
    for name, _ in module.named_parameters():
        path = name.split(".")
        owners = [module.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
        if not any(step in _declared(owner) for owner, step in zip(owners, path, strict=True)):
            return name
    return None


def _declared(module: nn.Module) -> set[str]:
    return {*getattr(module, "by_query_head", ()), *getattr(module, "by_key_head", ())}


def state_of_heads(module: nn.Module) -> str | None:
    """The name of a buffer that holds a row per head and changes in training; None if there is none."""
    for each in module.modules():
        for name in _declared(each) & set(each._buffers):
            return name
    return None


def counters_of(module: nn.Module) -> Iterator[Tensor]:
    """The buffers that count forward passes in training, of modules that are in training."""
    for each in module.modules():
        if each.training:
            yield from (each.get_buffer(name) for name in getattr(each, "counters", ()))


def tied(x: Tensor, *others: Tensor | None) -> Tensor:
    """x, whose gradient is 0 to the others: they have one, even if no head at hand reads them."""
    nothing = [other.reshape(-1)[:0].sum().to(x.dtype) for other in others if other is not None]
    return x + torch.stack(nothing).sum() if nothing else x
