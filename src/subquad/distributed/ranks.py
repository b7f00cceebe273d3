"""Ranks over which sequences of any lengths are split."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.distributed.collectives import gather
from subquad.distributed.process_group import group_of
from subquad.distributed.sequence import Sequence
from subquad.distributed.shares import even_shares


class Ranks:
    """The ranks of a process group, over which a model's sequences are split, whatever their lengths.

    Args:
        group: a process group, or a one-dimensional device mesh of torch such as `mesh["sp"]`; None: all processes.
        mode: as of `Sequence`.

    Raises:
        ValueError: the mode is unknown, or the group does not have this process.
        TypeError: `group` is neither a group nor a mesh.
        RuntimeError: there is no process group.
    """

    def __init__(self, group: Any = None, *, mode: str = "auto") -> None:
        self.group, self.mode = group_of(group, mode), mode
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._known: dict[Any, Sequence] = {}

    def sequence(self, lengths: Iterable[int], keys: Iterable[int] | None = None) -> Sequence:
        """The sequence with these numbers of tokens and of keys per rank; the same object for the same numbers."""
        both = tuple(lengths), None if keys is None else tuple(keys)
        if both not in self._known:
            self._known[both] = Sequence(both[0], keys=both[1], group=self.group, mode=self.mode)
        return self._known[both]

    def even(self, tokens: int, keys: int | None = None) -> Sequence:
        """An even split of this number of tokens, and of a number of keys for cross-attention."""
        return self.sequence(even_shares(tokens, self.ranks), None if keys is None else even_shares(keys, self.ranks))

    def gathered(self, numbers: Tensor) -> Tensor:
        """Gather a tensor from all ranks, of one shape, as (ranks, …), in one exchange."""
        return torch.stack(gather(numbers, [numbers.shape] * self.ranks, self.group))

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # a process group is not copied

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a process group cannot be pickled; call sq.hf.restore(model), or swap without `parallel`, before saving a "
            "whole model, or save it with save_pretrained"
        )
