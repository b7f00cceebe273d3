"""Positions of tokens in their own item, and the blocks and lists of patterns there."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.core.rounding import ceil_div
from subquad.core.versions import sym_min
from subquad.kernels.tokens.positions import ValidPositions
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask


@dataclass(frozen=True)
class Item:
    """The start and the number of tokens of each item, if only some of its keys are available.

    Attributes:
        first: the position of its first real token, which may be below 0.
        length: the number of tokens from its first real one to its last.
        tokens: the length of the longest item that there may be.
    """

    first: Int64[Tensor, "#B 1"]
    length: Int64[Tensor, "#B 1"]
    tokens: int

    def from_key(self, key: int) -> "Item":
        """The items with positions that are counted from this key on."""
        return replace(self, first=self.first - key)


KEYS = 1024  # of a bucket, where queries meet all keys: in several buckets they are worked on side by side


@dataclass(frozen=True)
class PatternPositions:
    """The tokens of each item by their places: positions that are counted from the item's first real token.

        tensor     · · a b c · d · ·       · is padding
        places         0 1 2 3 4           of an item of length 5: padding inside of it has a place, and meets nobody

    So the padding around an item moves none of its blocks. Queries are at the positions that the mask's offset gives.
    """

    valid_positions: ValidPositions
    heads: int
    first: Int64[Tensor, "#B 1"]  # the position of each item's first real token
    length: Int64[Tensor, "#B 1"]
    start: Int64[Tensor, "#B 1"]  # the place of query 0, which may be below 0
    tokens: int  # length of the longest item that there may be

    @staticmethod
    def from_mask(
        mask: Mask, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], item: Item | None = None
    ) -> "PatternPositions":
        """The places of one call. Tokens that are real as a query or as a key count, on a cache those that are keys."""
        line = ValidPositions.from_mask(mask, query, key)
        if item is not None:
            start = line.positions[:, :1] - item.first
            return PatternPositions(line, query.shape[1], item.first, item.length, start, item.tokens)
        valid = line.valid_keys
        if line.aligned and valid is not None:
            valid = None if line.valid_queries is None else valid | line.valid_queries
        position = torch.arange(line.M, device=line.device)[None]
        first, end = position[:, :1], position[:, -1:] + 1
        if valid is not None:
            first = torch.where(valid, position, line.M).amin(1, keepdim=True)
            end = torch.where(valid, position + 1, 0).amax(1, keepdim=True)
        return PatternPositions(
            line, query.shape[1], first, (end - first).clamp(min=0), line.positions[:, :1] - first, line.M
        )

    def blocks(self, size: int) -> Int64[Tensor, "#B T"]:
        """The numbers of the blocks of `size` places with queries; block 0 begins at place 0."""
        line = self.valid_positions
        if line.aligned:
            return torch.arange(ceil_div(line.N, size), device=line.device)[None]
        count = ceil_div(line.N - 1, size) + 1  # as the queries may begin anywhere in a block
        return self.start.clamp(min=0) // size + torch.arange(count, device=line.device)

    def queries(self, positions: Int64[Tensor, "#B #H T S"]) -> Int64[Tensor, "#B #H T S"]:
        """The queries at these places; empty where there is none."""
        numbers, N = positions - self.start[:, None, None], self.valid_positions.N
        return torch.where((positions >= 0) & (numbers >= 0) & (numbers < N), numbers, N)

    def keys(self, positions: Int64[Tensor, "#B #H C K"]) -> Int64[Tensor, "#B #H C K"]:
        """The keys at these places; empty where there is none."""
        first, length, M = self.first[:, None, None], self.length[:, None, None], self.valid_positions.M
        numbers = positions + first
        return torch.where((positions >= 0) & (positions < length) & (numbers >= 0) & (numbers < M), numbers, M)

    def of_queries(self, slots: Int64[Tensor, "B H T S"]) -> Int64[Tensor, "B H T S"]:
        """The places of these queries."""
        return slots + self.start[:, None, None]

    def of_keys(self, slots: Int64[Tensor, "B H C K"]) -> Int64[Tensor, "B H C K"]:
        """The places of these keys."""
        return slots - self.first[:, None, None]

    def buckets(self, queries: Tensor, keys: Tensor, bucket: Tensor | None = None, span: int | None = None) -> Buckets:
        """Buckets for every item and head, without padding; what they are made of may be the same for several."""
        queries, keys = (x.expand(self.valid_positions.B, self.heads, *x.shape[2:]) for x in (queries, keys))
        if bucket is not None:
            bucket = bucket.expand(queries.shape[:3])
        return Buckets(queries, keys, bucket, span).of_valid(
            self.valid_positions.valid_queries, self.valid_positions.valid_keys
        )

    def meet_all(self, queries: Int64[Tensor, "#B #H 1 S"]) -> Buckets:
        """One block of queries that meet all keys."""
        M = self.valid_positions.M
        size = sym_min(M, KEYS)
        keys = torch.arange(ceil_div(M, size) * size, device=queries.device).clamp(max=M).view(1, 1, -1, size)
        return self.buckets(queries.expand(-1, -1, keys.shape[2], -1), keys)

    def all_meet(self, queries: Int64[Tensor, "#B #H T S"], keys: Int64[Tensor, "#B #H 1 K"]) -> Buckets:
        """Blocks of queries that all meet the same keys."""
        return self.buckets(queries, keys, torch.zeros_like(queries[..., 0]))

    def meet_themselves(self, which: Bool[Tensor, "#B N"]) -> Buckets:
        """Each of these queries alone with the key at its position."""
        line = self.valid_positions
        position = line.positions
        keys = torch.where((position >= 0) & (position < line.M), position, line.M)
        queries = torch.where(which, torch.arange(line.N, device=which.device), line.N)
        return self.buckets(queries[:, None, :, None], keys[:, None, :, None])


def each_at(distances: Int64[Tensor, "K"], mask: Mask, query: Float[Tensor, "B H N D"], M: int) -> Buckets:
    """Every query alone with the keys at these distances from it, ahead of it where they are positive."""
    B, H, N, _ = query.shape
    queries = torch.arange(N, device=query.device).view(1, 1, N, 1)
    keys = mask.positions(queries) + distances
    keys = torch.where((keys >= 0) & (keys < M), keys, M).expand(B, H, -1, -1)
    return Buckets(queries.expand(B, H, -1, -1), keys).of_valid(mask.query_padding(N), mask.key_padding(M))


def of_heads(buckets: Buckets, N: int, which: Bool[Tensor, "H"]) -> Buckets:
    """The buckets of some of the heads; those of the others hold no query."""
    return replace(buckets, queries=torch.where(which[:, None, None], buckets.queries, N))
