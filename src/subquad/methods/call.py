"""The arguments and results that `Method.__call__` and `attend` pass to each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from subquad.masks import Mask
from subquad.parallel.heads import Heads

Partial = tuple[Tensor, Tensor | None]  # (out, lse); lse is None where it is not known or nobody asked


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
    kept: Any = None  # tokens whose row and column are exact: a `keep.Kept`, whose module imports this one
    parallel: Any = None  # a `sq.parallel.Sequence`, of whose tokens these are one rank's
    heads: Heads | None = None  # which of the layer's heads these are; None: all
    item: Any = None  # a `places.Item`, where only some of each item's keys are at hand

    @property
    def hidden_as_head(self) -> tuple[Tensor, ...]:
        """The layer's input as one head, (B,1,N,width); empty where the method does not need it."""
        return () if self.hidden is None else (self.hidden[:, None],)

    def head_numbers(self, query: Tensor) -> Tensor:
        """The number of each query head (B,H,N,D) among all of the layer."""
        first = 0 if self.heads is None else self.heads.queries.start
        return torch.arange(first, first + query.shape[1], device=query.device)

    def all_heads(self, query: Tensor) -> int:
        """How many query heads the layer has."""
        return query.shape[1] if self.heads is None else self.heads.total

    def all_key_heads(self, key: Tensor) -> int:
        """How many key heads the layer has."""
        return key.shape[1] if self.heads is None else self.heads.key_total

    def first_half(self, query: Tensor) -> Tensor:
        """Which of the query heads are in the first half of the layer's, which is the larger one."""
        return self.head_numbers(query) < (self.all_heads(query) + 1) // 2

    def under(self, mask: Mask) -> Call:
        """A copy of the call with another mask."""
        return replace(self, mask=mask)
