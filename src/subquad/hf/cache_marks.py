"""Marks on caches: which of their items are read by YaRN, and which have no real token so far. See `item_rotary`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Cache, EncoderDecoderCache

_EXTENDED = "_subquad_extended"  # on a cache: whether its items have YaRN's frequencies, a bool or bool (B,1)
_UNDECIDED = "_subquad_undecided"  # on a cache: which items (B,1) have no real token so far; None: none
_FOLLOWING = "_subquad_following"  # on methods of caches after they were wrapped

Extended = bool | Tensor  # whether items are read by YaRN: all or none, or bool (B,1), or (B,N) for packed sequences


def mark_cache(cache: Any, extended: Extended | None, undecided: Tensor | None) -> None:
    """Keep on a cache which of its items are read by YaRN, and which (B,1) have no real token so far."""
    setattr(cache, _EXTENDED, extended)
    setattr(cache, _UNDECIDED, undecided)


def extended_in(cache: Any) -> Extended | None:
    """The items of a cache that are read by YaRN; None if it has no mark."""
    extended: Extended | None = getattr(cache, _EXTENDED, None)
    return extended


def undecided_in(cache: Any) -> Tensor | None:
    """The items (B,1) of a cache that have no real token so far; None if there are none."""
    undecided: Tensor | None = getattr(cache, _UNDECIDED, None)
    return undecided


def follow_items() -> None:
    """Make caches remember which of their items are read by YaRN when these are reordered, selected or repeated."""
    for cls in (Cache, EncoderDecoderCache):
        for name in ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
            change = vars(cls).get(name)  # None: inherited, from a class that is wrapped too
            if change is not None and not hasattr(change, _FOLLOWING):
                setattr(cls, name, _followed(change))


def _followed(change: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(change)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = change(self, *args, **kwargs)
        (items,) = (*args, *kwargs.values())
        for mark in (_EXTENDED, _UNDECIDED):
            kept = getattr(self, mark, None)
            if isinstance(kept, Tensor):  # else it is the same for all items
                items = items.to(kept.device) if isinstance(items, Tensor) else items
                setattr(self, mark, kept.repeat_interleave(items, 0) if isinstance(items, int) else kept[items])
        return result

    setattr(changed, _FOLLOWING, True)
    return changed
