"""Fixed attention of the Sparse Transformer: a query's own block, and the last columns of every block.

Child, Gray, Radford, Sutskever 2019, "Generating Long Sequences with Sparse Transformers", section 4.3:

    own_i     = {j: ⌊j/l⌋ = ⌊i/l⌋}
    summary_i = {j: j mod l ≥ l − c}
    out_i     = Σ_j softmax_j(scale · q_i·k_j) v_j,   j ∈ own_i ∪ summary_i      sets="merged"
                                                      j ∈ own_i                  "near"
                                                      j ∈ summary_i ∪ {i}        "far"; "heads": half of the heads each

Under a causal mask j ≤ i, as in the paper. The last c tokens of each block are where it can be summed up: all others
see them.

==========  ==============================================
paper       here
==========  ==============================================
l           block
c           columns
A^(1)       near
A^(2)       far
p           sets: merged, by heads, or by layers
==========  ==============================================

Deviations from the paper. A query sees itself in the distant part too: the first ones of a causal sequence would see
nothing there. i and j are counted from each item's first real token, so that padding moves no block.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subquad.core.rounding import ceil_div
from subquad.core.versions import sym_min
from subquad.kernels.selection.pattern_positions import PatternPositions, of_heads
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask
from subquad.methods.core.method import Call, Traits, choice, whole
from subquad.methods.core.pattern import SETS, Pattern, with_sets

NOWHERE = -1  # where there is no token


@dataclass(frozen=True)
class Fixed(Pattern):
    """Attention to a query's own block and to the last tokens of every block. Self-attention only.

    Args:
        block: l, tokens of a block. About √(columns · N) is cheapest.
        columns: c, tokens at the end of each block that all queries see.
        sets: "merged", the block and the columns in one softmax; "heads", the block in the first half of the heads and
            the columns in the others; "near" or "far", the block or the columns in all heads.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 300, 4)
    >>> sq.attention(q, k, v, method=sq.Fixed(block=16, columns=2), is_causal=True).shape
    torch.Size([1, 2, 300, 4])
    """

    block: int = whole(128, least=1)
    columns: int = whole(8, least=1)
    sets: str = choice(*SETS)

    name: ClassVar[str] = "fixed"
    traits: ClassVar[Traits] = replace(
        Pattern.shared_traits,
        subquadratic=False,
        from_start=True,
        exact_limit={"block": "N"},
        example={"block": 4, "columns": 1},
        complexity="O(N·(l + c·N/l)·D) time with blocks of l and c columns, which is O(N√N·D) at l = √N",
        source="Child et al. 2019, section 4.3",
    )

    def check(self) -> None:
        """Raise ValueError if there are more columns than a block has tokens."""
        if self.columns > self.block:
            raise ValueError(
                f"{self.name!r}: columns={self.columns} needs a larger block: with block={self.block} it must be at "
                f"most {self.block}"
            )

    def describe(self) -> Traits:
        """The traits: which settings see all keys depends on the sets, and blocks alone take linear time."""
        why = "half of the heads see their own block only, and half the columns only"
        return with_sets(type(self).traits, self.sets, far={"block": 1, "columns": 1}, heads=why)

    def reach(self, tokens: int, mask: Mask) -> tuple[int, int]:
        """The numbers of tokens before and after itself that a query may see in its block."""
        span = min(self.block, tokens)
        return span, 0 if mask.is_causal else span

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet: those of the query's own block, and the columns of the other blocks."""
        pattern, N = PatternPositions.from_mask(call.mask, query, key, call.item), query.shape[2]
        block_of_query = pattern.blocks(self.block)
        tokens = torch.arange(sym_min(self.block, pattern.valid_positions.M), device=query.device)
        block = block_of_query[:, None, :, None] * self.block + tokens
        aligned = pattern.valid_positions.aligned
        queries = pattern.queries(block if aligned else self._query_positions(pattern, block_of_query))
        if self.sets == "merged":
            columns = self._columns(pattern)
            elsewhere = columns // self.block < block_of_query[:, None, :, None]
            if not call.mask.is_causal:
                elsewhere = elsewhere | (columns // self.block > block_of_query[:, None, :, None])
            columns = torch.where(elsewhere, columns, NOWHERE)
            keys = torch.cat([block.expand(len(columns), -1, -1, -1), columns], dim=3)
            return (pattern.buckets(queries, pattern.keys(keys)),)
        near = pattern.buckets(queries, pattern.keys(block))
        if self.sets == "near":
            return (near,)
        far = pattern.all_meet(queries, pattern.keys(self._columns(pattern)))
        itself = pattern.meet_themselves(self._in_no_column(pattern))
        if self.sets == "far":
            return far, itself
        first = call.first_half(query)
        return of_heads(near, N, first), of_heads(far, N, ~first), of_heads(itself, N, ~first)

    def _query_positions(self, pattern: PatternPositions, block_of_query: Tensor) -> Tensor:
        """The places of the queries of each block, (#B,1,T,S), which may be beyond the last key."""
        block = block_of_query[:, None, :, None]
        size = sym_min(self.block, pattern.valid_positions.N)
        first = torch.maximum(block * self.block, pattern.start[:, None, None])
        positions = first + torch.arange(size, device=first.device)
        return torch.where(positions // self.block == block, positions, NOWHERE)

    def _columns(self, pattern: PatternPositions) -> Tensor:
        """The positions of all columns, (1,1,1,K)."""
        M = pattern.valid_positions.M
        start = self.block * torch.arange(ceil_div(M, self.block), device=pattern.first.device)[:, None]
        column = self.block - self.columns + torch.arange(sym_min(self.columns, M), device=start.device)
        return (start + column).view(1, 1, 1, -1)

    def _in_no_column(self, pattern: PatternPositions) -> Tensor:
        """The tokens that are in no column, (#B,N)."""
        return (pattern.valid_positions.positions - pattern.first) % self.block < self.block - self.columns
