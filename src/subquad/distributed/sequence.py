"""A sequence whose tokens are split over ranks, as users make one and as methods call it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.core.shapes import Sizes
from subquad.distributed.global_tokens import kept_among
from subquad.distributed.process_group import group_of
from subquad.distributed.run import check_split, kept_of_rank, loss_of_rank, mask_of_rank, run_split
from subquad.distributed.shares import even_shares
from subquad.distributed.token_split import TokenSplit
from subquad.masks import Mask
from subquad.methods.core.call import Call, Partial, Shard
from subquad.methods.core.current_shard import running_split
from subquad.methods.core.method import Method


class Sequence(TokenSplit, Shard):
    """A sequence whose tokens are split over the ranks of a process group, in the order of the ranks.

    Every rank of the group makes the same one, and all make the same calls with it.

    Args:
        lengths: number of tokens of each rank, 1 or more.
        keys: number of keys of each rank, if these are other tokens (cross-attention).
        group: a process group, or a one-dimensional device mesh of torch such as `mesh["sp"]`; None: all processes.
        mode: "summary": ranks send a summary of their keys, whose size does not depend on their number, and methods
            that cannot are refused; "heads": each rank receives all tokens of its share of the heads; "ring": exact
            attention, for which keys and values go from rank to rank; "auto": the first of "summary" and "heads" that
            the method can, and of exact attention a ring where there are fewer heads than ranks.

    Raises:
        ValueError: the lengths do not fit the group, which does not have this process, or the mode is unknown.
        TypeError: `group` is neither a group nor a mesh.
        RuntimeError: there is no process group.
    """

    _of_queries: Sequence | None = None

    @staticmethod
    def even(tokens: int, group: Any = None, *, keys: int | None = None, mode: str = "auto") -> Sequence:
        """An even split: the first ranks have one token more if the number does not divide."""
        group = group_of(group, mode)
        ranks = dist.get_world_size(group)
        of_keys = None if keys is None else even_shares(keys, ranks)
        return Sequence(even_shares(tokens, ranks), keys=of_keys, group=group, mode=mode)

    @property
    def of_queries(self) -> Sequence:
        """The sequence of the queries, for self-attention."""
        if self.keys is None:
            return self
        if self._of_queries is None:
            self._of_queries = Sequence(self.lengths, group=self.group, mode=self.mode)
        return self._of_queries

    def mask_of_rank(self, mask: Mask, sizes: Sizes, device: torch.device) -> tuple[Mask, Sizes]:
        """The mask for the tokens of this rank, and the sizes of the whole call. ValueError if they do not fit."""
        return mask_of_rank(mask, sizes, self, device)

    def kept_of_rank(self, keep: Any, query: Tensor, mask: Mask) -> Tensor | None:
        """The argument `keep` as numbers of tokens of the sequence, or as bools for this rank's; None for no token."""
        return kept_of_rank(keep, query, mask, self)

    def kept_among(self, keep: Any, query: Tensor, mask: Mask) -> Tensor | None:
        """The tokens of this rank that the argument `keep` names, as bools; None where no rank has such tokens."""
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self.kept_among)(keep, query, mask)
        named = kept_of_rank(keep, query, mask, self)
        return None if named is None else kept_among(named, query, self.local(mask), self)

    def check(self, method: object, query: Tensor, key: Tensor, value: Tensor, call: Call) -> None:
        """Raise ValueError if the ranks disagree, or the call cannot be split."""
        assert isinstance(method, Method)
        check_split(method, query, key, value, call, self)

    def run(self, method: object, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """The partial of this rank's queries over the keys of all ranks."""
        assert isinstance(method, Method)
        with running_split():
            return run_split(method, query, key, value, replace(call, parallel=None), self)

    def auxiliary_loss(self, method: object, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """This rank's part of the auxiliary loss: the parts of all ranks add up to that of one process."""
        assert isinstance(method, Method)
        return loss_of_rank(method, query, key, value, replace(call, parallel=None), self)

    def __deepcopy__(self, memo: Any) -> Sequence:
        return self  # a process group is not copied
