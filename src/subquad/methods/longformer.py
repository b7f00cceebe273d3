"""Longformer: a window for every token, and a few global tokens, which see and are seen by all tokens.

    N_i   = {j: |i − j| ≤ window · dilation, i − j a multiple of dilation}
    G     = the first tokens of the item
    out_i = Σ_{j ∈ N_i ∪ G} softmax_j(scale · q_i·k_j) v_j           for i not in G
    out_i = Σ_j softmax_j(scale · q_i·k_j) v_j                       for i in G, all keys

Under a causal mask a query sees those of these keys that are not after it: all later tokens see a global token.

==========  ==========================================================
paper       here
==========  ==========================================================
w           2 · window: the paper counts both sides, as attention_window of published models does
d           dilation
G           first; other tokens, or other ones in each item, by `keep=`
==========  ==========================================================

Deviations from the paper, each on purpose. Global attention has the projections of all other attention, since a method
sees queries, keys and values only; published models have projections of their own for it, which
`sq.nn.MultiheadAttention` gives with `global_projections=True`. All heads have one dilation: `mixed-heads` gives others
to some of them.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subquad.core.versions import sym_min
from subquad.kernels.selection.neighbours import neighbours
from subquad.kernels.selection.pattern_positions import Item, PatternPositions
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask
from subquad.methods.core.method import Call, Traits, whole
from subquad.methods.core.pattern import Pattern


@dataclass(frozen=True)
class Longformer(Pattern):
    """Window attention with global tokens, the first ones of each item. Self-attention only.

    Args:
        window: tokens to each side that a query sees; with a causal mask, to the past.
        dilation: a query sees every dilation-th token only, so that the window reaches window · dilation tokens.
        first: global tokens at the start of each item.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 300, 4)
    >>> out = sq.attention(q, k, v, method=sq.Longformer(window=20, first=1))
    >>> kept = sq.attention(q, k, v, method=sq.Local(window=20), keep=[0])
    >>> torch.allclose(out, kept, atol=1e-5)
    True
    """

    window: int = whole(64)
    dilation: int = whole(1, least=1, clamped=True)
    first: int = whole(1, clamped=True)

    name: ClassVar[str] = "longformer"
    traits: ClassVar[Traits] = replace(
        Pattern.shared_traits,
        from_start=True,
        exact_limit={"window": "N", "dilation": 1},
        example={"window": 3, "dilation": 2, "first": 2},
        complexity="O(N·(W + g)·D) time, O(N·(W + g + D)) memory with a window of W and g global tokens",
        source="Beltagy et al. 2020",
    )

    def describe(self) -> Traits:
        """The traits: without global tokens, distances alone matter."""
        return type(self).traits if self.first else replace(type(self).traits, from_start=False)

    def reach(self, tokens: int, mask: Mask) -> tuple[int, int]:
        """The numbers of tokens before and after itself that a query sees, in addition to the global ones."""
        span = min(self.window * self.dilation, tokens)
        return span, 0 if mask.is_causal else span

    def globally_visible(self, item: Item, causal: bool) -> Tensor | None:
        """The positions of the global tokens."""
        return torch.arange(min(self.first, item.tokens), device=item.first.device)[None] if self.first else None

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet: near ones, the global keys, and all keys for the global queries."""
        near = neighbours(query, key, self.window, call.mask, self.dilation)
        if self.first == 0:
            return (near,)
        pattern, N, M = PatternPositions.from_mask(call.mask, query, key, call.item), query.shape[2], key.shape[2]
        first = torch.arange(sym_min(self.first, pattern.tokens), device=query.device).view(1, 1, 1, -1)
        others = torch.where(self._are_global(pattern.of_queries(near.queries)), N, near.queries)
        keys = torch.where(self._are_global(pattern.of_keys(near.keys)), M, near.keys)
        # Under a causal mask what a global query sees is not behind it, so that those keys are global too.
        seeing = near.queries if call.mask.is_causal else others
        parts = replace(near, queries=others, keys=keys), pattern.all_meet(seeing, pattern.keys(first))
        return parts if call.mask.is_causal else (*parts, rows_of_first(self.first, pattern))

    def _are_global(self, tokens: Tensor) -> Tensor:
        return (tokens >= 0) & (tokens < self.first)


def rows_of_first(first: int, pattern: PatternPositions) -> Buckets:
    """The first queries of each item, which meet all keys."""
    numbers = torch.arange(sym_min(first, pattern.tokens), device=pattern.first.device).view(1, 1, 1, -1)
    return pattern.meet_all(pattern.queries(numbers))
