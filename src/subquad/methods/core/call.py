"""The arguments and results that `Method.__call__` and `attend` pass to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from subquad.core.shapes import Sizes
from subquad.kernels.tokens.rotary import Rotary
from subquad.masks import Mask
from subquad.methods.core.head_subset import Heads

Partial = tuple[Tensor, Tensor | None]  # (out, lse); lse is None where it is not known or nobody asked
Attend = Callable[[Tensor, Tensor, Tensor, "Call"], Partial]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # out of query, key and value; all else is prepared
Prepare = Callable[[Tensor, Tensor, Tensor, "Call"], Attention]
PrepareStep = Callable[[Tensor, Tensor, Tensor, "Call"], Attention | None]  # None: the call goes the general way


@dataclass(frozen=True, eq=False)
class Call:
    """The checked options of a call, which `Method.__call__` passes to `attend` with query, key and value."""

    mask: Mask
    bias: Tensor | None
    scale: float
    dropout_p: float
    seed: int
    learned: Any = None  # the learned parameters, as `Method.make_learned` made them
    wants_lse: bool = False  # whether the log-sum-exp is asked for
    hidden: Tensor | None = None  # the layer's input at the queries, (B,N,width), for methods that need it
    kept: Any = None  # tokens whose row and column are exact: a `global_tokens.Kept`, whose module imports this one
    parallel: Shard | None = None  # the sequence of whose tokens these are one rank's, until its ranks run the method
    heads: Heads | None = None  # the heads of the layer that these are; None: all
    item: Any = None  # a `places.Item`, where only some of each item's keys are at hand
    rotary: Rotary | None = None  # by which angles positions turned queries and keys, where that is known

    @property
    def hidden_as_head(self) -> tuple[Tensor, ...]:
        """The layer's input as one head, (B,1,N,width); empty where the method does not need it."""
        return () if self.hidden is None else (self.hidden[:, None],)

    def head_numbers(self, query: Tensor) -> Tensor:
        """The number of each query head (B,H,N,D) among all of the layer."""
        first = 0 if self.heads is None else self.heads.queries.start
        return torch.arange(first, first + query.shape[1], device=query.device)

    def all_heads(self, query: Tensor) -> int:
        """The number of query heads of the layer."""
        return query.shape[1] if self.heads is None else self.heads.total

    def all_key_heads(self, key: Tensor) -> int:
        """The number of key heads of the layer."""
        return key.shape[1] if self.heads is None else self.heads.key_total

    def first_half(self, query: Tensor) -> Tensor:
        """The query heads that are in the first half of the layer's, which is the larger one."""
        return self.head_numbers(query) < (self.all_heads(query) + 1) // 2

    def under(self, mask: Mask) -> Call:
        """A copy of the call with another mask."""
        return replace(self, mask=mask)

    def of_item(self, number: int) -> Call:
        """A copy of the call with the rotary positions of one item of the batch."""
        return self if self.rotary is None else replace(self, rotary=self.rotary.of_item(number))


class Shard(ABC):
    """One rank's part of a sequence whose tokens are split over several processes.

    This is all that methods know of ranks: `Method` hands each step of a call with `parallel` on to it. It is
    implemented by `subquad.distributed.Sequence`. The argument `method` is a `Method`, whose module imports this one.
    """

    @property
    @abstractmethod
    def of_queries(self) -> Shard:
        """The sequence of self-attention: without keys of its own."""

    @abstractmethod
    def mask_of_rank(self, mask: Mask, sizes: Sizes, device: torch.device) -> tuple[Mask, Sizes]:
        """The mask for the tokens of this rank, and the sizes of the whole call. ValueError if they do not fit."""

    @abstractmethod
    def kept_of_rank(self, keep: Any, query: Tensor, mask: Mask) -> Tensor | None:
        """The argument `keep` as numbers of tokens of the sequence, or as bools for this rank's; None for no token."""

    @abstractmethod
    def kept_among(self, keep: Any, query: Tensor, mask: Mask) -> Tensor | None:
        """The tokens of this rank that the argument `keep` names, as bools; None where no rank has such tokens."""

    @abstractmethod
    def check(self, method: object, query: Tensor, key: Tensor, value: Tensor, call: Call) -> None:
        """Raise ValueError if the ranks disagree, or the call cannot be split."""

    @abstractmethod
    def run(self, method: object, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """The partial of this rank's queries over the keys of all ranks."""

    @abstractmethod
    def auxiliary_loss(self, method: object, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | None:
        """This rank's part of the auxiliary loss: the parts of all ranks add up to that of one process."""


def checked_shard(parallel: object) -> Shard | None:
    """The argument `parallel` of a call. TypeError if it is neither None nor a sequence that is split over ranks."""
    if not (parallel is None or isinstance(parallel, Shard)):
        raise TypeError(f"`parallel` is a {type(parallel).__name__}, but it must be a sq.distributed.Sequence")
    return parallel
