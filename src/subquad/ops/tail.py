"""The tail of a bucket: the keys that are not in it, as a few centroid keys in the same softmax."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.masks import Mask
from subquad.ops.bucket_attention import bucket_attention
from subquad.ops.buckets import Buckets, members
from subquad.ops.hashing import hash_codes
from subquad.ops.heads import repeat_heads
from subquad.ops.kmeans import hamming_kmeans
from subquad.ops.softmax import merge_partials


@dataclass(frozen=True)
class Tail:
    """For every bucket the centroids of the keys outside of it, one a cell, and how many keys each stands for."""

    key: Float[Tensor, "B G C X D"]
    value: Float[Tensor, "B G C X E"]
    count: Float[Tensor, "B G C X"]


BITS, ITERATIONS = 63, 5  # of the k-means that makes the cells


def key_cells(key: Float[Tensor, "B G M D"], mask: Mask, cells: int, seed: int) -> Int64[Tensor, "B G M"]:
    """Cells of keys that are alike: k-means of their sign hashes. Padded keys are in cell number `cells`."""
    real = mask.key_padding(key.shape[2])
    codes = hash_codes(key, BITS, seed, centre=True, real=real)
    return hamming_kmeans(codes, real, cells, BITS, ITERATIONS)


def complement_cells(
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    inside: Int64[Tensor, "B G C K"],
    cell: Int64[Tensor, "B G M"],
    cells: int,
) -> Tail:
    """Mean key and mean value of the keys of each cell that are not in the bucket: k̄, v̄ and their number n.

    A cell of `cells` is none: padding. The gradient flows through the means; cells and buckets are constants.
    """
    M, C = key.shape[2], inside.shape[2]
    outside = 1.0 - members(inside, M)
    in_cell = torch.nn.functional.one_hot(cell, cells + 1)[..., :cells]
    weights = (outside[..., :, None] * in_cell[..., None, :]).flatten(3).transpose(-1, -2).to(key.dtype)
    count = weights.sum(-1)
    share = weights / count.clamp(min=1)[..., None]
    sizes = (C, cells)
    return Tail((share @ key).unflatten(2, sizes), (share @ value).unflatten(2, sizes), count.unflatten(2, sizes))


def attend_with_tail(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    buckets: Buckets,
    tail: Tail,
    *,
    scale: float,
    dropout_p: float,
) -> Float[Tensor, "B H N E"]:
    """One softmax over a bucket's keys and its tail, whose logits are scale·q·k̄ + ln n."""
    merged = bucket_attention(query, key, value, buckets, Mask(), scale=scale, dropout_p=dropout_p)
    C, X = tail.count.shape[2:]
    numbers = torch.arange(C * X, device=query.device).view(C, X).expand_as(tail.count)
    slots = repeat_heads(torch.where(tail.count > 0, numbers, C * X), query.shape[1])
    of_tail = bucket_attention(
        query,
        tail.key.flatten(2, 3),
        tail.value.flatten(2, 3),
        Buckets(buckets.queries, slots, buckets.bucket),
        Mask(),
        scale=scale,
        key_bias=repeat_heads(tail.count.clamp(min=1).log().flatten(2)[..., None], query.shape[1])[..., 0],
        dropout_p=dropout_p,
    )
    return merge_partials([merged, of_tail])[0]
