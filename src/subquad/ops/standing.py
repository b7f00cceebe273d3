"""Where the tokens of one rank stand among the real tokens of their items on all ranks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.masks import Mask
from subquad.ops.pools import pool_of
from subquad.ops.timeline import ranks, real_lengths
from subquad.parallel import Sequence
from subquad.parallel.collectives import gather


@dataclass(frozen=True)
class Standing:
    """The tokens of this rank.

    Attributes:
        real: which of them are real.
        rank: how many real tokens of its item stand before each, on all ranks.
        counts: how many real tokens of each item each rank has.
    """

    real: Bool[Tensor, "B M"]
    rank: Int64[Tensor, "#B M"]
    counts: Int64[Tensor, "_R B"]
    own: int  # the number of this rank

    @property
    def tokens(self) -> Int64[Tensor, "B"]:
        """How many real tokens each item has on all ranks."""
        return self.counts.sum(0)

    @property
    def before(self) -> Int64[Tensor, "B"]:
        """How many real tokens each item has on the ranks before this one."""
        return self.counts[: self.own].sum(0)

    def ends(self, x: Float[Tensor, "B H M D"], number: int) -> Float[Tensor, "B H S D"]:
        """This rank's share of the first `number` real tokens of each item and of the last ones: 0 but for its own."""
        S = torch.arange(number, device=x.device)
        place = torch.cat([S.expand(len(self.tokens), -1), self.tokens[:, None] - number + S], dim=1)
        at = (self.rank[:, None] == place[..., None]) & self.real[:, None]
        return at.to(x.dtype)[:, None] @ x


def standings(
    mask: Mask, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], of: Sequence
) -> tuple[Standing, Standing]:
    """The standing of this rank's queries and keys; by one exchange of numbers, where there is padding."""
    B, device = query.shape[0], query.device
    sides = []
    for x, lengths, padding in (
        (query, of.lengths, mask.query_padding(query.shape[2])),
        (key, of.key_lengths, mask.key_padding(key.shape[2])),
    ):
        counts = torch.tensor(lengths, device=device)[:, None].expand(-1, B)
        sides.append((x.shape[2], padding, counts))
    if any(real is not None for _, real, _ in sides):
        own = torch.stack([real_lengths(real, B, n, device) for n, real, _ in sides])
        every = torch.stack(gather(own, [own.shape] * of.ranks, of.group), dim=1)
        sides = [(n, real, counts) for (n, real, _), counts in zip(sides, every, strict=True)]
    queries, keys = (_standing(n, real, counts, of.rank) for n, real, counts in sides)
    return queries, keys


def _standing(n: int, real: Tensor | None, counts: Tensor, own: int) -> Standing:
    B = counts.shape[1]
    before = counts[:own].sum(0)[:, None]
    rank = ranks(real, n, counts.device) + (before[:1] if real is None else before)
    there = torch.ones(B, n, dtype=torch.bool, device=counts.device) if real is None else real
    return Standing(there, rank, counts, own)


def pool_sums(x: Float[Tensor, "B H M D"], standing: Standing, pools: int, skip: int = 0) -> Float[Tensor, "B H C D"]:
    """What this rank has of the sums of an item's pools, which leave out `skip` tokens at each end of the item."""
    tokens = (standing.tokens - 2 * skip)[:, None]
    rank = standing.rank - skip
    label = torch.where(standing.real & (rank >= 0) & (rank < tokens), pool_of(rank, tokens, pools), pools)
    sums = x.new_zeros(*x.shape[:2], pools + 1, x.shape[3])
    return sums.scatter_add(2, label[:, None, :, None].expand_as(x), x)[:, :, :pools]
