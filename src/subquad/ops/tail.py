"""The tail of a bucket: the keys that are not in it, as a few centroid keys in the same softmax.

A cell is a set of keys that are alike. What is outside of bucket b stands in for by one key and one value a cell, taken
as the bucket's mean query q̄ sees them, with w = softmax over the cell's keys outside of b of scale·q̄·k_j:

    k̄ = Σ_j w_j k_j,   v̄ = Σ_j w_j v_j,   ln Σ_j e^{scale·q·k_j} ≈ scale·(q − q̄)·k̄ + ln Σ_j e^{scale·q̄·k_j}

This is the first-order expansion at q = q̄, exact there. At q̄ = 0 it would be a plain mean and + ln n.
"""

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
from subquad.ops.softmax import hide, merge_partials, visible_softmax

BITS, ITERATIONS = 63, 5  # of the k-means that makes the cells


@dataclass(frozen=True)
class Tail:
    """For every bucket, and every cell of keys outside of it: k̄, v̄, and what is added to the logit scale·q·k̄.

    `bias` is −inf for a cell without keys outside of the bucket.
    """

    key: Float[Tensor, "B H C X D"]
    value: Float[Tensor, "B H C X E"]
    bias: Float[Tensor, "B H C X"]


def key_cells(key: Float[Tensor, "B G M D"], mask: Mask, cells: int, seed: int) -> Int64[Tensor, "B G M"]:
    """Cells of keys that are alike: k-means of their sign hashes. Padded keys are in cell number `cells`."""
    real = mask.key_padding(key.shape[2])
    codes = hash_codes(key, BITS, seed, centre=True, real=real)
    return hamming_kmeans(codes, real, cells, BITS, ITERATIONS)


def mean_queries(query: Float[Tensor, "B H N D"], buckets: Buckets) -> Float[Tensor, "B H C D"]:
    """The mean of each bucket's queries, 0 for a bucket without any."""
    assert buckets.bucket is not None
    N, C = query.shape[2], buckets.keys.shape[2]
    in_block = members(buckets.queries, N).to(query.dtype)
    of_bucket = torch.nn.functional.one_hot(buckets.bucket, C).to(query.dtype)
    inside = in_block @ of_bucket
    return inside.transpose(-1, -2) @ query / inside.sum(2).clamp(min=1)[..., None]


def tail_of(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    buckets: Buckets,
    cell: Int64[Tensor, "B G M"],
    cells: int,
    scale: float,
) -> Tail:
    """k̄, v̄ and bias of every bucket and cell. The gradient flows through all of them; cells and buckets are constants.

    A cell number of `cells` is none: padding.
    """
    H, M = query.shape[1], key.shape[2]
    towards = mean_queries(query, buckets)
    key, value = repeat_heads(key, H), repeat_heads(value, H)
    outside = members(buckets.keys, M).transpose(-1, -2) == 0
    in_cell = torch.nn.functional.one_hot(repeat_heads(cell[..., None], H)[..., 0], cells + 1)[..., :cells].bool()
    seen = outside[:, :, :, None] & in_cell.transpose(-1, -2)[:, :, None]  # (B,H,C,X,M)
    logits = (towards @ key.transpose(-1, -2) * scale)[:, :, :, None].expand_as(seen)
    weights = visible_softmax(logits, seen)
    centroid = weights.flatten(2, 3) @ key
    centroid = centroid.unflatten(2, seen.shape[2:4])
    own = (centroid @ towards[..., None])[..., 0] * scale
    bias = torch.where(seen.any(-1), hide(logits, seen).logsumexp(-1) - own, -torch.inf)
    return Tail(centroid, (weights.flatten(2, 3) @ value).unflatten(2, seen.shape[2:4]), bias)


def attend_with_tail(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    buckets: Buckets,
    cell: Int64[Tensor, "B G M"],
    cells: int,
    *,
    scale: float,
    dropout_p: float,
) -> Float[Tensor, "B H N E"]:
    """One softmax over the keys of a query's bucket and that bucket's tail."""
    merged = bucket_attention(query, key, value, buckets, Mask(), scale=scale, dropout_p=dropout_p)
    tail = tail_of(query, key, value, buckets, cell, cells, scale)
    C, X = tail.bias.shape[2:]
    numbers = torch.arange(C * X, device=query.device).view(C, X)
    there = ~torch.isneginf(tail.bias)
    of_tail = bucket_attention(
        query,
        tail.key.flatten(2, 3),
        tail.value.flatten(2, 3),
        Buckets(buckets.queries, torch.where(there, numbers, C * X), buckets.bucket),
        Mask(),
        scale=scale,
        key_bias=torch.where(there, tail.bias, 0.0).flatten(2),
        dropout_p=dropout_p,
    )
    return merge_partials([merged, of_tail])[0]
