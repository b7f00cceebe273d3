"""Positions and ranks of tokens, derived from the mask of a call."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.core.versions import sym_max, sym_min
from subquad.kernels.tokens.slots import Slots, taken
from subquad.masks import Mask


@dataclass(frozen=True)
class ValidPositions:
    """The queries and the keys of one call, on the line of the keys.

    A token's *position* is its number in the tensor; query i has the position of key i + offset, the mask's offset.
    A token's *rank* is its number among its item's real tokens, which padding does not change.
    """

    mask: Mask
    valid_queries: Bool[Tensor, "B N"] | None  # None: all are
    valid_keys: Bool[Tensor, "B M"] | None
    B: int
    N: int
    M: int
    device: torch.device

    @staticmethod
    def from_mask(mask: Mask, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"]) -> "ValidPositions":
        """The valid positions of attention under this mask."""
        (B, _, N, _), M = query.shape, key.shape[2]
        return ValidPositions(mask, mask.query_padding(N), mask.key_padding(M), B, N, M, query.device)

    @property
    def aligned(self) -> bool:
        """True if query i is known to have the position of key i, without reading a tensor."""
        return bool(self.N == self.M and self.mask.aligned)

    @property
    def positions(self) -> Int64[Tensor, "#B N"]:
        """The position of each query among the keys, which the offset may put beyond the last key or below 0."""
        return self.mask.positions(torch.arange(self.N, device=self.device)[None])

    @property
    def line_positions(self) -> Int64[Tensor, "B N"]:
        """The position of each query on the line of keys; queries beyond the last key follow each other."""
        start = self.mask.positions(torch.zeros(1, 1, dtype=torch.int64, device=self.device)).clamp(max=self.M)
        return (start + torch.arange(self.N, device=self.device)).expand(self.B, self.N)

    @property
    def positions_beyond(self) -> int:
        """The number of positions behind the last key that `line_positions` may need; N if the offset is a tensor."""
        offset = self.mask.offset
        return self.N if isinstance(offset, Tensor) else sym_max(sym_min(offset or 0, self.M) + self.N - self.M, 0)

    @property
    def query_lengths(self) -> Int64[Tensor, "B"]:
        """The number of real queries of each item."""
        return valid_lengths(self.valid_queries, self.B, self.N, self.device)

    @property
    def key_lengths(self) -> Int64[Tensor, "B"]:
        """The number of real keys of each item."""
        return valid_lengths(self.valid_keys, self.B, self.M, self.device)

    def tokens(self, *, valid_as: str) -> Bool[Tensor, "B N"]:
        """In self-attention, which tokens are real: as "both" query and key, or as "either"."""
        every = torch.ones(self.B, self.N, dtype=torch.bool, device=self.device)
        query, key = (every if side is None else side for side in (self.valid_queries, self.valid_keys))
        return query & key if valid_as == "both" else query | key

    @property
    def query_ranks(self) -> Int64[Tensor, "B N"]:
        """The rank of the last real key that is not behind the query; 0 where no real key is at or before it."""
        positions = self.positions.expand(self.B, self.N)
        if self.valid_keys is None:
            return positions
        return (self.valid_keys.cumsum(1) - 1).clamp(min=0).gather(1, positions.clamp(max=self.M - 1))


def valid_lengths(
    valid: Bool[Tensor, "B N"] | None, batch: int, tokens: int, device: torch.device
) -> Int64[Tensor, "B"]:
    """The number of real tokens of each item."""
    if valid is None:
        return torch.full((batch,), tokens, dtype=torch.int64, device=device)
    return valid.sum(1)


def ranks(valid: Bool[Tensor, "B M"] | None, M: int, device: torch.device) -> Int64[Tensor, "#B M"]:
    """The number of real tokens of its item that precede each token."""
    if valid is None:
        return torch.arange(M, device=device)[None]
    return valid.cumsum(1) - valid.long()


def front_first(valid: Bool[Tensor, "B M"]) -> Int64[Tensor, "B M"]:
    """The tokens of each item, the real ones first, both in their order."""
    return (~valid).to(torch.int8).argsort(dim=1, stable=True)


@dataclass(frozen=True)
class ValidIndex:
    """The real keys of each item in order; in `order`, other keys follow the last one."""

    order: Int64[Tensor, "B M"]
    lengths: Int64[Tensor, "B"]

    @staticmethod
    def from_mask(valid: Bool[Tensor, "B M"] | None, batch: int, tokens: int, device: torch.device) -> "ValidIndex":
        """The ranks of real keys; None for `valid` means that all keys are real."""
        lengths = valid_lengths(valid, batch, tokens, device)
        if valid is None:
            return ValidIndex(torch.arange(tokens, device=device).expand(batch, tokens), lengths)
        return ValidIndex(front_first(valid), lengths)

    @property
    def tokens(self) -> int:
        """M, the number in an empty slot."""
        return self.order.shape[1]

    def at(self, ranks: Int64[Tensor, "B T S"]) -> Slots:
        """The tokens of these ranks; slots are empty where an item has no such rank."""
        present = (ranks >= 0) & (ranks < self.lengths[:, None, None])
        in_order = self.order.gather(1, ranks.clamp(0, self.tokens - 1).flatten(1)).view_as(ranks)
        return Slots(torch.where(present, in_order, self.tokens), self.tokens)

    def between(self, first: Int64[Tensor, "B T"], end: Int64[Tensor, "B T"], most: int) -> Slots:
        """The tokens of the ranks from `first` up to `end`, at most `most` of them."""
        asked = first[..., None] + torch.arange(most, device=first.device)
        return self.at(torch.where(asked < end[..., None], asked, -1))

    def ends(self, front: int, back: int, blocks: int) -> Slots:
        """For each of `blocks` blocks, the first `front` and the last `back` real tokens of its item, each once."""
        B, device = len(self.lengths), self.order.device
        begin = torch.arange(front, device=device).expand(B, front)
        last = self.lengths[:, None] - 1 - torch.arange(back, device=device)
        last = torch.where(last < front, -1, last)  # a short item has it at the front already
        return self.at(torch.cat([begin, last], dim=1)[:, None].expand(-1, blocks, -1))


@dataclass(frozen=True)
class KeyLine:
    """The tokens of each item that are real as a query or as a key, in their order from the front on.

    keys      · k k · k k k          the tensor, with padding (·)
    queries       q q   q            aligned with keys by the mask's offset
    line      k k k k k              keys in the line
                q q   q              queries in the line: 0 where a token is none

    Queries beyond the last key follow each other in positions behind it, where no key is real.
    """

    order: Int64[Tensor, "B L"] | None  # the former position of each key; None: all stay
    at: Int64[Tensor, "B N"] | None  # positions of the queries among the keys; None: those of the keys
    line_positions: Int64[Tensor, "B N"] | None  # positions of the queries in the line; None: query i is token i
    valid: Bool[Tensor, "B L"]  # True for real keys of the line
    lengths: Int64[Tensor, "B"]
    beyond: int = 0  # positions behind the last key: L − M

    @staticmethod
    def from_positions(valid_positions: ValidPositions) -> "KeyLine":
        """Line up the queries and the keys of a call."""
        B, M, queries, keys = (
            valid_positions.B,
            valid_positions.M,
            valid_positions.valid_queries,
            valid_positions.valid_keys,
        )
        valid = torch.ones(B, M, dtype=torch.bool, device=valid_positions.device) if keys is None else keys
        at, beyond = None, 0
        if valid_positions.aligned:
            if keys is None:  # all are in the line, be they real as queries or not
                return KeyLine(None, None, None, valid, valid.sum(1))
            present = torch.ones_like(valid) if queries is None else valid | queries
        else:
            at, beyond = valid_positions.line_positions, valid_positions.positions_beyond
            valid = F.pad(valid, (0, beyond))
            present = valid.scatter(1, at, True if queries is None else valid.gather(1, at) | queries)
        order = front_first(present)
        rank = (present.cumsum(1) - 1).clamp(min=0)
        ranks = rank if at is None else rank.gather(1, at)
        return KeyLine(order, at, ranks, valid.gather(1, order), present.sum(1), beyond)

    def keys(self, x: Float[Tensor, "B G M D"]) -> Float[Tensor, "B G L D"]:
        """Put keys, or data of keys, into the line."""
        if self.order is None:
            return x
        return taken(F.pad(x, (0, 0, 0, self.beyond)) if self.beyond else x, self.order)

    def queries(self, x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H L D"]:
        """Put queries into the line; 0 for tokens that are not queries."""
        if self.order is None or self.at is None:
            return self.keys(x)
        return taken(placed(x, self.at, self.valid.shape[1]), self.order)

    def back(self, x: Float[Tensor, "B H L E"]) -> Float[Tensor, "B H N E"]:
        """Take the results of queries out of the line."""
        return x if self.line_positions is None else taken(x, self.line_positions)


def placed(x: Float[Tensor, "B H N D"], at: Int64[Tensor, "B N"], length: int) -> Float[Tensor, "B H {length} D"]:
    """Put queries at the positions `at` of a line of `length` tokens, with 0 elsewhere; `taken` is the inverse."""
    B, H, N, D = x.shape
    return x.new_zeros(B, H, length, D).scatter(2, at[:, None, :, None].expand(B, H, N, D), x)
