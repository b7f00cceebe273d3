"""Real tokens by rank: the order that padding does not change, for blocks and segments of each item's own length."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from subquad.masks import Mask
from subquad.ops.buckets import real_lengths


@dataclass(frozen=True)
class Ranks:
    """The real keys of each item in order; `order` holds M behind the last one."""

    order: Int64[Tensor, "B M"]
    lengths: Int64[Tensor, "B"]

    @property
    def tokens(self) -> int:
        """M."""
        return self.order.shape[1]

    def at(self, ranks: Int64[Tensor, "B T S"]) -> Int64[Tensor, "B T S"]:
        """The tokens of these ranks; M where an item has none of that rank."""
        there = (ranks >= 0) & (ranks < self.lengths[:, None, None])
        found = self.order.gather(1, ranks.clamp(0, self.tokens - 1).flatten(1)).view_as(ranks)
        return torch.where(there, found, self.tokens)


def ranks_of(real: Bool[Tensor, "B M"] | None, batch: int, tokens: int, device: torch.device) -> Ranks:
    """The ranks of real keys; None: all are."""
    lengths = real_lengths(real, batch, tokens, device)
    if real is None:
        return Ranks(torch.arange(tokens, device=device).expand(batch, tokens), lengths)
    return Ranks((~real).to(torch.int8).argsort(dim=1, stable=True), lengths)


def query_ranks(mask: Mask, batch: int, N: int, M: int, device: torch.device) -> Int64[Tensor, "B N"]:
    """The rank of the last real key that is not behind the query, which the mask's offset places among the keys.

    0 where no real key is at or before it.
    """
    offset = mask.offset.to(device).view(-1, 1) if isinstance(mask.offset, Tensor) else mask.offset or 0
    positions = (torch.arange(N, device=device) + offset).expand(batch, N)
    real = mask.key_padding(M)
    if real is None:
        return positions
    return (real.cumsum(1) - 1).clamp(min=0).gather(1, positions.clamp(max=M - 1))


def slots(
    ranks: Ranks, first: Int64[Tensor, "B T"], end: Int64[Tensor, "B T"], most: int
) -> Int64[Tensor, "B T {most}"]:
    """The tokens of the ranks from `first` up to `end`, at most so many."""
    asked = first[..., None] + torch.arange(most, device=first.device)
    return torch.where(asked < end[..., None], ranks.at(asked), ranks.tokens)


def sink_slots(
    ranks: Ranks, first: Int64[Tensor, "B T"], end: Int64[Tensor, "B T"], front: int, back: int
) -> Int64[Tensor, "B T S"]:
    """The tokens of the first `front` and the last `back` ranks of each item that are not in `first`…`end`."""
    begin = torch.arange(front, device=first.device).expand(len(first), front)
    last = ranks.lengths[:, None] - 1 - torch.arange(back, device=first.device)
    last = torch.where(last < front, -1, last)  # a short item has it at the front already
    asked = torch.cat([begin, last], dim=1)[:, None].expand(-1, first.shape[1], -1)
    near = (asked >= first[..., None]) & (asked < end[..., None])
    return torch.where(near, ranks.tokens, ranks.at(asked))
