"""Real tokens by rank: the order that padding does not change, for blocks and segments of each item's own length."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
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


@dataclass(frozen=True)
class Line:
    """The tokens of each item that are real as a query or as a key, in their order from the front on."""

    order: Int64[Tensor, "B M"] | None  # where each one stood; None: all stay where they are
    at: Int64[Tensor, "B N"] | None  # where the queries stood among the keys; None: where the keys did
    places: Int64[Tensor, "B N"] | None  # of the queries in the line; None: query i is token i
    real: Bool[Tensor, "B M"]  # which of the line are real keys
    lengths: Int64[Tensor, "B"]

    def keys(self, x: Float[Tensor, "B G M D"]) -> Float[Tensor, "B G M D"]:
        """Keys, or what goes with them, in the line."""
        return x if self.order is None else taken(x, self.order)

    def queries(self, x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H M D"]:
        """Queries in the line; 0 where a token is none."""
        if self.at is not None:
            B, H, N, D = x.shape
            at = self.at[:, None, :, None].expand(B, H, N, D)
            x = x.new_zeros(B, H, self.real.shape[1], D).scatter(2, at, x)
        return self.keys(x)

    def back(self, x: Float[Tensor, "B H M E"]) -> Float[Tensor, "B H N E"]:
        """What the line's queries got, handed back to them."""
        return x if self.places is None else taken(x, self.places)


def line_up(mask: Mask, batch: int, N: int, M: int, device: torch.device) -> Line:
    """Line up N queries and M keys; the mask's offset places the queries among the keys."""
    queries, keys = mask.query_padding(N), mask.key_padding(M)
    real = torch.ones(batch, M, dtype=torch.bool, device=device) if keys is None else keys
    at = None
    if N == M and mask.aligned:
        if keys is None:  # all are in the line, be they real as queries or not
            return Line(None, None, None, real, real.sum(1))
        there = torch.ones_like(real) if queries is None else real | queries
    else:
        offset = mask.offset.to(device).view(-1, 1) if isinstance(mask.offset, Tensor) else mask.offset or 0
        at = (torch.arange(N, device=device) + offset).expand(batch, N).clamp(max=M - 1)
        there = real.scatter(1, at, True if queries is None else real.gather(1, at) | queries)
    order = (~there).to(torch.int8).argsort(dim=1, stable=True)
    rank = (there.cumsum(1) - 1).clamp(min=0)
    return Line(order, at, rank if at is None else rank.gather(1, at), real.gather(1, order), there.sum(1))


def taken(x: Float[Tensor, "B H M D"], tokens: Int64[Tensor, "B N"]) -> Float[Tensor, "B H N D"]:
    """The rows of these tokens."""
    B, H, _, D = x.shape
    return x.gather(2, tokens[:, None, :, None].expand(B, H, tokens.shape[1], D))
