"""Chunks: runs of a sorted order, cut by rank, so that padding has no part in where they begin."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


def sort_real(scores: Float[Tensor, "B H N"], real: Bool[Tensor, "B N"] | None) -> Int64[Tensor, "B H N"]:
    """The tokens by rising score, stably; padded ones come last."""
    if real is not None:
        scores = scores.masked_fill(~real[:, None], torch.inf)
    return scores.argsort(dim=-1, stable=True)


def tokens_at(order: Int64[Tensor, "B H N"], ranks: Int64[Tensor, "#B #H T S"], inside: Tensor) -> Tensor:
    """The tokens of these ranks in an order, (B,H,T,S); N, an empty slot, where `inside` is false."""
    B, H, N = order.shape
    ranks = ranks.clamp(0, N - 1).expand(B, H, -1, -1)
    return torch.where(inside, order.gather(2, ranks.flatten(2)).unflatten(2, ranks.shape[2:]), N)


def even_chunks(
    order: Int64[Tensor, "B H N"], lengths: Int64[Tensor, "B"], counts: Int64[Tensor, "B"], *, most: int, size: int
) -> Int64[Tensor, "B H C S"]:
    """Cut the first n tokens of an order into `counts` chunks of n/counts tokens, rounded up or down.

    Chunk c holds the ranks from ⌊c·n/counts + ½⌋ to the next such; `most` ≥ counts chunks of `size` slots are returned.
    """
    starts, ends = _edges(lengths, counts, most)
    return _between(order, starts, ends, size)


def even_shared_chunks(
    order: Int64[Tensor, "B H N"], lengths: Int64[Tensor, "B"], counts: Int64[Tensor, "B"], *, most: int, size: int
) -> Int64[Tensor, "B H C S"]:
    """As `even_chunks`, but none of an item's chunks is empty: where tokens are few, neighbours share one."""
    starts, ends = _edges(lengths, counts, most)
    starts = starts.minimum((lengths[:, None] - 1).clamp(min=0))
    used = (torch.arange(most, device=order.device) < counts[:, None]) & (lengths[:, None] > 0)
    return _between(order, starts, torch.where(used, ends.maximum(starts + 1), starts), size)


def _edges(lengths: Tensor, counts: Tensor, most: int) -> tuple[Int64[Tensor, "B C"], Int64[Tensor, "B C"]]:
    counts = counts[:, None]
    chunk = torch.arange(most + 1, device=lengths.device).minimum(counts)
    edges = (2 * chunk * lengths[:, None] + counts) // (2 * counts)
    return edges[:, :-1], edges[:, 1:]


def _between(order: Tensor, starts: Tensor, ends: Tensor, size: int) -> Int64[Tensor, "B H C S"]:
    ranks = starts[..., None] + torch.arange(size, device=order.device)
    return tokens_at(order, ranks[:, None], (ranks < ends[..., None])[:, None])
