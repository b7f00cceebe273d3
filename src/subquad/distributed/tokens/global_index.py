"""The positions of one rank's tokens among the real tokens of their items on all ranks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.distributed.collectives import gather
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.tokens.pools import pool_of
from subquad.kernels.tokens.positions import ranks, valid_lengths
from subquad.masks import Mask


@dataclass(frozen=True)
class GlobalIndex:
    """The tokens of this rank among the real tokens of their items on all ranks.

    Attributes:
        valid: True for real tokens.
        index: the number of real tokens of its item that precede each, on all ranks.
        counts: the number of real tokens of each item on each rank.
    """

    valid: Bool[Tensor, "B M"]
    index: Int64[Tensor, "#B M"]
    counts: Int64[Tensor, "_R B"]
    this_rank: int

    @property
    def tokens(self) -> Int64[Tensor, "B"]:
        """The number of real tokens of each item on all ranks."""
        return self.counts.sum(0)

    @property
    def before(self) -> Int64[Tensor, "B"]:
        """The number of real tokens of each item on the ranks before this one."""
        return self.counts[: self.this_rank].sum(0)

    def ends(self, x: Float[Tensor, "B H M D"], number: int) -> Float[Tensor, "B H S D"]:
        """This rank's share of the first `number` real tokens of each item and of the last ones: 0 but for its own."""
        S = torch.arange(number, device=x.device)
        position = torch.cat([S.expand(len(self.tokens), -1), self.tokens[:, None] - number + S], dim=1)
        at = (self.index[:, None] == position[..., None]) & self.valid[:, None]
        return at.to(x.dtype)[:, None] @ x


def global_indices(
    mask: Mask, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], split: TokenSplit
) -> tuple[GlobalIndex, GlobalIndex]:
    """The global indices of this rank's queries and keys; by one exchange of numbers, where there is padding."""
    B, device = query.shape[0], query.device
    sides = []
    for x, lengths, padding in (
        (query, split.lengths, mask.query_padding(query.shape[2])),
        (key, split.key_lengths, mask.key_padding(key.shape[2])),
    ):
        counts = torch.tensor(lengths, device=device)[:, None].expand(-1, B)
        sides.append((x.shape[2], padding, counts))
    if any(valid is not None for _, valid, _ in sides):
        local = torch.stack([valid_lengths(valid, B, n, device) for n, valid, _ in sides])
        every = torch.stack(gather(local, [local.shape] * split.ranks, split.group), dim=1)
        sides = [(n, valid, counts) for (n, valid, _), counts in zip(sides, every, strict=True)]
    queries, keys = (_global_index(n, valid, counts, split.rank) for n, valid, counts in sides)
    return queries, keys


def _global_index(n: int, valid: Tensor | None, counts: Tensor, this_rank: int) -> GlobalIndex:
    B = counts.shape[1]
    before = counts[:this_rank].sum(0)[:, None]
    index = ranks(valid, n, counts.device) + (before[:1] if valid is None else before)
    valid = torch.ones(B, n, dtype=torch.bool, device=counts.device) if valid is None else valid
    return GlobalIndex(valid, index, counts, this_rank)


def pool_sums(x: Float[Tensor, "B H M D"], side: GlobalIndex, pools: int, skip: int = 0) -> Float[Tensor, "B H C D"]:
    """This rank's part of the sums of an item's pools, which leave out `skip` tokens at each end of the item."""
    tokens = (side.tokens - 2 * skip)[:, None]
    index = side.index - skip
    label = torch.where(side.valid & (index >= 0) & (index < tokens), pool_of(index, tokens, pools), pools)
    sums = x.new_zeros(*x.shape[:2], pools + 1, x.shape[3])
    return sums.scatter_add(2, label[:, None, :, None].expand_as(x), x)[:, :, :pools]
