"""Chunks: runs of a sorted order, cut by rank, so that padding has no part in where they begin."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.core.rounding import ceil_div
from subquad.kernels.tokens.slots import Buckets
from subquad.kernels.transforms import shapes_may_follow_data


def sort_valid(scores: Float[Tensor, "B H N"], valid: Bool[Tensor, "B N"] | None) -> Int64[Tensor, "B H N"]:
    """The tokens by rising score, stably; padded ones come last."""
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None], torch.inf)
    return scores.argsort(dim=-1, stable=True)


def tokens_at(order: Int64[Tensor, "B H N"], ranks: Int64[Tensor, "#B #H T S"], inside: Tensor) -> Tensor:
    """The tokens of these ranks in an order, (B,H,T,S); N, an empty slot, where `inside` is false."""
    B, H, N = order.shape
    ranks = ranks.clamp(0, N - 1).expand(B, H, *ranks.shape[2:])
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
    """Cut each item into even chunks of which none is empty: where tokens are few, neighbouring chunks share one."""
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


def runs_of_labels(labels: Int64[Tensor, "B H N"], groups: int, size: int) -> Buckets:
    """Sort tokens by (label, position), cut the order into chunks of `size`: each meets its label in two chunks.

    Those are its own chunk and the one before it; the first has none before it. One block holds the tokens of one label
    in one chunk. Labels of `groups` are in none. Outside of torch.compile and vmap, unused blocks are cut off.
    """
    N = labels.shape[2]
    order = labels.argsort(dim=-1, stable=True)
    label = labels.gather(2, order)
    rank = torch.arange(N, device=labels.device).expand_as(labels)
    first = label != F.pad(label, (1, 0), value=-1)[..., :-1]
    begins = first | (rank % size == 0)
    label_start, run_start = (torch.where(at, rank, 0).cummax(-1).values for at in (first, begins))

    runs = ceil_div(N, size) + groups
    run = torch.where(label == groups, runs, begins.cumsum(-1) - 1)
    nobody = torch.full((*labels.shape[:2], (runs + 1) * size), N, device=labels.device)
    queries = nobody.scatter(2, run * size + torch.where(label == groups, 0, rank - run_start), order)
    none = torch.zeros_like(nobody)[..., : runs + 1]
    # Every token of a run brings the same number to `start`.
    start = none.scatter(2, run, label_start.maximum((rank // size - 1) * size))[..., :runs]
    end = none.scatter_reduce(2, run, rank + 1, "amax")[..., :runs]
    queries = queries[..., : runs * size].unflatten(2, (runs, size))
    if shapes_may_follow_data(labels):
        used = int((end > 0).sum(-1).max())
        queries, start, end = queries[:, :, :used], start[..., :used], end[..., :used]
    ranks = start[..., None] + torch.arange(2 * size, device=labels.device)
    return Buckets(queries, tokens_at(order, ranks, ranks < end[..., None]))


def chunks_of(order: Int64[Tensor, "B H N"], lengths: Int64[Tensor, "B"], size: int) -> Int64[Tensor, "B H T S"]:
    """Cut the first n tokens of an order into chunks of `size`; the last may be shorter."""
    blocks = ceil_div(order.shape[2], size)
    ranks = torch.arange(blocks * size, device=order.device).view(1, 1, blocks, size)
    return tokens_at(order, ranks, ranks < lengths[:, None, None, None])
