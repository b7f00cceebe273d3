"""BigBird: blocks of tokens that see the adjacent blocks, some random blocks, and the first and last ones.

Zaheer, Guruganesh, Dubey, Ainslie, Alberti, Ontanon, Pham, Ravula, Wang, Yang, Ahmed 2020, "Big Bird: Transformers for
Longer Sequences", section 2 and appendix D (BigBird-ITC):

    an item's tokens are cut into blocks of b; block t sees the blocks

    G       = the first and the last ones                           global: they see all blocks
    W_t     = {s: |s − t| ≤ window}                                 near ones
    R_t     = `random` others, uniform among those outside of G and W_t, for each head its own
    out_i   = Σ_j softmax_j(scale · q_i·k_j) v_j, j in the blocks G ∪ W_t ∪ R_t of i's block t

          0 1 2 3 4 5 6 7
    0     g g g g g g g g          g global
    1     g w w . r . . g          w window = 1
    2     g w w w . . r g          r random = 1
    3     g r w w w . . g
          …
    7     g g g g g g g g

==========  =============================================
paper       here
==========  =============================================
b           block
g           first + last, in blocks
w           2 · window + 1, in blocks
r           random, in blocks
==========  =============================================

Under a causal mask block t sees those blocks of G and W_t that are not after it, and R_t is drawn among the earlier
ones. The last blocks are then not global, because a growing sequence has none.

Blocks are counted in each item, from its first token to its last. Random blocks depend on the seed, the head, the
block's number and how many there are to choose from, never on the batch or on padding.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor

from subquad.core.randomness import uniform
from subquad.core.rounding import ceil_div
from subquad.core.versions import sym_min
from subquad.kernels.selection.pattern_positions import Item, PatternPositions
from subquad.kernels.tokens.slots import Buckets, Slots
from subquad.masks import Mask
from subquad.methods.core.method import MOST_REPEATS, Call, Traits, whole
from subquad.methods.core.pattern import Pattern

NONE = -1  # in lists of blocks


def draw(
    choices: Int64[Tensor, "#B T"], picks: int, head: Int64[Tensor, "H"], block: Tensor, seed: int
) -> Int64[Tensor, "#B H T R"]:
    """Sample `picks` distinct numbers below `choices` for each head and block; −1 where there are fewer.

    Floyd's algorithm, in which each set is equally likely: the k-th pick is uniform up to choices − picks + k, or that
    number itself if the pick is taken already.
    """
    head, block = head[:, None], block[:, None]
    picked = choices.new_full((len(choices), len(head), choices.shape[1], 0), NONE)
    for k in range(picks):
        last = (choices - picks + k)[:, None]
        pick = (uniform(seed, head, block, torch.full_like(block, k)) * (last + 1)).long().minimum(last)
        taken = (picked == pick[..., None]).any(-1)
        pick = torch.where(taken, last, pick).clamp(min=NONE)
        picked = torch.cat([picked, pick[..., None]], dim=-1)
    return picked


@dataclass(frozen=True)
class BigBird(Pattern):
    """BigBird: each block of tokens sees adjacent, random and global blocks. Self-attention only.

    Args:
        block: tokens of a block.
        window: blocks to each side that a block sees, in addition to itself; with a causal mask, in the past.
        random: further blocks that each block sees, drawn for each head.
        first: blocks at the start of an item that see all and that all see.
        last: such blocks at its end. They have no part under a causal mask.
        seed: random seed of the random blocks.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 300, 4)
    >>> sq.attention(q, k, v, method=sq.BigBird(block=16, random=2)).shape
    torch.Size([1, 2, 300, 4])
    """

    block: int = whole(64, least=1, clamped=True)
    window: int = whole(1, clamped=True)
    random: int = whole(3, most=MOST_REPEATS)
    first: int = whole(1, clamped=True)
    last: int = whole(1, clamped=True)
    seed: int = whole(0)

    name: ClassVar[str] = "bigbird"
    traits: ClassVar[Traits] = replace(
        Pattern.shared_traits,
        stochastic=True,
        from_start=True,
        exact_limit={"block": "N"},
        example={"block": 4, "random": 1},
        complexity="O(N·b·(g + w + r)·D) time, with blocks of b tokens, each of which sees g + w + r blocks",
        source="Zaheer et al. 2020",
    )

    def reach(self, tokens: int, mask: Mask) -> tuple[int, int]:
        """The numbers of tokens before and after itself that a query sees, in addition to the global ones."""
        span = min((self.window + 1) * self.block, tokens)
        return span, 0 if mask.is_causal else span

    def globally_visible(self, item: Item, causal: bool) -> Tensor | None:
        """The positions of the tokens of global blocks."""
        size = min(self.block, item.tokens)
        ends = self.global_blocks(ceil_div(item.length, size), ceil_div(item.tokens, size), causal)
        return tokens_of(ends[:, None, None], size)[:, 0, 0] if ends.shape[1] else None

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet: the blocks that each block sees, and all for the global blocks."""
        pattern, causal = PatternPositions.from_mask(call.mask, query, key, call.item), call.mask.is_causal
        size = sym_min(self.block, pattern.tokens)
        most = ceil_div(pattern.tokens, size)
        query_blocks, ends = pattern.blocks(size), self.global_blocks(ceil_div(pattern.length, size), most, causal)
        others = (
            query_blocks
            if causal
            else torch.where((query_blocks[..., None] == ends[:, None]).any(-1), NONE, query_blocks)
        )
        visible = self.visible_blocks(
            query_blocks, ends, ceil_div(pattern.length, size), most, call.head_numbers(query), call
        )
        keys = pattern.keys(tokens_of(visible, size))
        remaining = pattern.buckets(pattern.queries(tokens_of(others[:, None, :, None], size)), keys)
        if causal or self.first == self.last == 0:
            return (remaining,)
        return remaining, pattern.meet_all(pattern.queries(tokens_of(ends[:, None, None], size)))

    def global_blocks(self, count: Int64[Tensor, "#B 1"], most: int, causal: bool) -> Int64[Tensor, "#B S"]:
        """The numbers of an item's first and last global blocks, of `count` blocks."""
        first = torch.arange(sym_min(self.first, most), device=count.device).expand(len(count), -1)
        if causal:
            return first
        last = count - 1 - torch.arange(sym_min(self.last, most), device=count.device)
        last = torch.where(last < self.first, NONE, last)  # it is among the first ones, or there are no more
        return torch.cat([torch.where(first < count, first, NONE), last], dim=1)

    def visible_blocks(
        self,
        block: Int64[Tensor, "#B T"],
        ends: Int64[Tensor, "#B S"],
        count: Tensor,
        most: int,
        heads: Int64[Tensor, "H"],
        call: Call,
    ) -> Int64[Tensor, "#B H T C"]:
        """The blocks that each block sees, if it is not global itself: each once."""
        causal, window = call.mask.is_causal, sym_min(self.window, most)
        near = block[..., None] + torch.arange(-window, 1 if causal else window + 1, device=block.device)
        near = torch.where((near >= 0) & (causal | (near < count[..., None])), near, NONE)
        # Random blocks are between the global blocks, before the near ones or behind them.
        end = block if causal else count - self.last
        before = ((block - window).minimum(end) - self.first).clamp(min=0)
        behind = (block + window + 1).clamp(min=self.first)
        choices = before if causal else before + (end - behind).clamp(min=0)
        drawn = draw(choices, sym_min(self.random, most), heads, block, call.seed)
        before, behind = before[:, None, :, None], behind[:, None, :, None]
        drawn = torch.where(drawn < before, drawn + self.first, drawn - before + behind).where(drawn >= 0, NONE)
        parts = ends[:, None, None], near[:, None], drawn
        lists = torch.broadcast_shapes(*(part.shape[:3] for part in parts))
        ends, near, drawn = (part.expand(*lists, -1) for part in parts)
        return (Slots(ends, NONE) | Slots(near, NONE) | Slots(drawn, NONE)).tokens


def tokens_of(blocks: Int64[Tensor, "#B H T C"], size: int) -> Int64[Tensor, "#B H T _"]:
    """The positions of the tokens in these blocks; negative for slots without a block."""
    return (blocks[..., None] * size + torch.arange(size, device=blocks.device)).flatten(3)
