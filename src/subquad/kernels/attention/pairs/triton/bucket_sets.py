"""Sets of buckets as the kernels read them: how far each list is filled, and where each token's slots are."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.triton.groups import group_order


@dataclass(frozen=True)
class BucketSet:
    """One set of buckets, whose slots have numbers that follow those of the sets before it.

    Attributes:
        queries: (B,H,T,S), the slots of the blocks.
        keys: (B,H,C,K), the slots of the buckets.
        bucket: (B,H,T), the bucket of each block; None where they have one block each.
        queries_end: (B,H,T), behind the last filled slot of each block.
        keys_end: (B,H,C), behind the last filled slot of each bucket.
        span: the largest distance of tokens that meet, at most N + M; −1 for any distance.
        excess: by how much the distance that was asked for is larger.
        first_query: the number of the first query slot.
        first_key: the number of the first key slot.
    """

    queries: Tensor
    keys: Tensor
    bucket: Tensor | None
    queries_end: Tensor
    keys_end: Tensor
    span: int
    excess: int
    first_query: int
    first_key: int

    @property
    def pairs(self) -> int:
        """Query-key pairs of all blocks, by the shapes."""
        return self.queries.numel() * self.keys.shape[3]

    def blocks_by_bucket(self) -> dict[str, Any]:
        """The blocks of each bucket, less those without a query, as arguments of a kernel."""
        B, H, T, C = *self.queries.shape[:3], self.keys.shape[2]
        of_block = torch.arange(T, device=self.keys.device).expand(B, H, T) if self.bucket is None else self.bucket
        return slot_index([torch.where(self.queries_end > 0, of_block, C)[..., None]], C).arguments()

    def arguments(self) -> dict[str, Any]:
        """The set as arguments of a kernel."""
        return {
            "queries": self.queries,
            "queries_end": self.queries_end,
            "keys": self.keys,
            "keys_end": self.keys_end,
            "T": self.queries.shape[2],
            "S": self.queries.shape[3],
            "C": self.keys.shape[2],
            "K": self.keys.shape[3],
            "span": self.span,
            "WINDOW": self.span >= 0,
        }


def sets_of(x: Any) -> Iterator[BucketSet]:
    """The sets of a call."""
    N, M, first_query, first_key = x.query.shape[2], x.key.shape[2], 0, 0
    for queries, keys, bucket, span in zip(x.queries, x.keys, x.bucket, x.spans, strict=True):
        yield BucketSet(
            queries.contiguous(),
            keys.contiguous(),
            bucket.contiguous() if bucket.ndim == 3 else None,
            end_of(queries, N),
            end_of(keys, M),
            min(span, N + M),
            max(0, span - N - M),
            first_query,
            first_key,
        )
        first_query += queries.shape[2] * queries.shape[3]
        first_key += keys.shape[2] * keys.shape[3]


def filled(slots: Tensor, tokens: int) -> Tensor:
    """A bool that marks the slots with the number of a token."""
    return (slots >= 0) & (slots < tokens)


def end_of(slots: Tensor, tokens: int) -> Tensor:
    """Behind the last filled slot of each list, in int32; 0 where none is filled."""
    end = torch.arange(1, slots.shape[-1] + 1, device=slots.device, dtype=torch.int32)
    if end.numel() == 0:
        return slots.new_zeros(slots.shape[:-1], dtype=torch.int32)
    return torch.where(filled(slots, tokens), end, 0).amax(-1)


@dataclass(frozen=True)
class SlotIndex:
    """The places of each number in a list: `order[starts[i]]` to `order[starts[i + 1] − 1]`, in rising order.

    Attributes:
        order: (B,H,slots), the slots sorted by their number, stably; those that hold no number are in none.
        starts: (B,H,numbers + 1).
    """

    order: Tensor
    starts: Tensor

    def arguments(self) -> dict[str, Any]:
        """The places as arguments of a kernel."""
        return {"order": self.order, "starts": self.starts}


def slot_index(lists: Sequence[Tensor], numbers: int) -> SlotIndex:
    """The places of the numbers from 0 to `numbers` in (B,H,·,·) lists that follow each other."""
    return SlotIndex(*group_order(torch.cat([x.flatten(2) for x in lists], dim=2), numbers))
