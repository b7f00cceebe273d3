"""Projections of their own for global tokens: Beltagy et al. 2020, "Longformer", section 3.1.

    out_i = Σ_j softmax_j(scale · (x_i W_Q′)·(x_j W_K′)) x_j W_V′        for i in G, all keys
    out_i = the method, on the projections of all other attention        for other i, whose keys in G are these too

G holds the global tokens of the method, and kept tokens.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from subquad.kernels.selection.pattern_positions import PatternPositions
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask
from subquad.methods import BoundMethod, Longformer, Method
from subquad.methods.core.call import Shard, checked_shard
from subquad.methods.core.current_shard import in_use
from subquad.methods.core.global_tokens import Keep, kept_tokens
from subquad.methods.core.method import Call, Traits, whole
from subquad.methods.core.pattern import Pattern
from subquad.methods.longformer import rows_of_first


@dataclass(frozen=True)
class GlobalRows(Pattern):
    """The rows of the first tokens of each item alone; all other queries meet no key."""

    first: int = whole(1, clamped=True)

    name: ClassVar[str] = Longformer.name
    traits: ClassVar[Traits] = Longformer.traits

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet: all keys for the first queries."""
        return (rows_of_first(self.first, PatternPositions.from_mask(call.mask, query, key)),)


class GlobalTokens(nn.Module):
    """The projections of a layer's global tokens, which start as copies of the ordinary ones."""

    def __init__(self, method: Method, q_proj: nn.Linear, k_proj: nn.Linear, v_proj: nn.Linear):
        super().__init__()
        if not isinstance(method, Longformer):
            raise ValueError(
                f"global_projections=True, but {method.label!r} has no global tokens with projections of their own; "
                f"use {Longformer.name!r}"
            )
        self.rows = GlobalRows(first=method.first)
        self.q_proj, self.k_proj, self.v_proj = (_copy_of(each) for each in (q_proj, k_proj, v_proj))

    def around(self, attention: BoundMethod, query: Tensor, key: Tensor, value: Tensor) -> "WithRows":
        """The layer's attention with the rows of global tokens from these heads, (B,H,N,D) and (B,G,M,D)."""
        return WithRows(attention, self.rows, query, key, value)


@dataclass(frozen=True)
class WithRows:
    """A bound method whose rows of global tokens come from other queries, keys and values; called like one."""

    attention: BoundMethod
    rows: GlobalRows
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def method(self) -> Method:
        """The method of the layer."""
        return self.attention.method

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask | None = None,
        is_causal: bool = False,
        keep: Keep | None = None,
        hidden: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention, as `BoundMethod.forward` has it."""
        mask = mask or Mask()
        mask = mask & Mask.causal(offset=0) if is_causal else mask
        out = self.attention(query, key, value, mask=mask, keep=keep, **options)
        options["enable_gqa"] = self.query.shape[1] != self.key.shape[1]
        rows = self.rows(self.query, self.key, self.value, mask=mask, keep=keep, **options)
        which = self._which(mask, keep, checked_shard(in_use(options.get("parallel"))))
        return torch.where(which[:, None, :, None], rows, out)

    def _which(self, mask: Mask, keep: Keep | None, shard: Shard | None) -> Bool[Tensor, "B N"]:
        """The queries that are global: kept ones, and those that meet a key where kept tokens are left out."""
        kept = None
        if keep is not None and shard is not None:
            kept = shard.kept_among(keep, self.query, mask)
        elif keep is not None:
            tokens = kept_tokens(keep, self.query, self.key, mask)
            kept = None if tokens is None else tokens.among(self.query.shape[2])
        mask = mask if kept is None else mask & Mask.padding(~kept)
        one = [x.new_ones(x.shape[0], 1, x.shape[2], 1) for x in (self.query, self.key, self.key)]
        _, lse = self.rows(*one, mask=mask, return_lse=True, parallel=shard)
        first = ~lse[:, 0].isneginf()
        return first if kept is None else first | kept


def _copy_of(linear: nn.Linear) -> nn.Linear:
    copy = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device=linear.weight.device)
    copy.load_state_dict(linear.state_dict())
    return copy
