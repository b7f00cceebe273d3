"""The tail of a bucket: the keys that are not in it, as a few centroid keys in the same softmax.

A cell is a set of keys that are alike. What is outside of bucket b stands in for by one key and one value a cell, taken
as the bucket's mean query q̄ sees them, with w = softmax over the cell's keys outside of b of scale·q̄·k_j:

    k̄ = Σ_j w_j k_j,   v̄ = Σ_j w_j v_j,   ln Σ_j e^{scale·q·k_j} ≈ scale·(q − q̄)·k̄ + ln Σ_j e^{scale·q̄·k_j}

This is the first-order expansion at q = q̄, exact there. At q̄ = 0 it would be a plain mean and + ln n.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.masks import Mask
from subquad.ops.choose.blocks.op import by_bucket
from subquad.ops.choose.hashing.op import hash_codes
from subquad.ops.choose.kmeans.op import hamming_kmeans
from subquad.ops.groups import group_mean
from subquad.ops.heads import repeat_heads
from subquad.ops.parts.pairs.op import attend_pairs
from subquad.ops.precision import wide
from subquad.ops.slots import Buckets, members

BITS, ITERATIONS = 63, 5  # of the k-means that makes the cells
KEYS = 64  # of a block of one cell


@dataclass(frozen=True)
class Tail:
    """For every cell, and every bucket that it is seen from: k̄, v̄, and what is added to the logit scale·q·k̄.

    `bias` is −inf for a cell without keys outside of the bucket.
    """

    key: Float[Tensor, "B H X C D"]
    value: Float[Tensor, "B H X C E"]
    bias: Float[Tensor, "B H X C"]


def key_cells(key: Float[Tensor, "B G M D"], mask: Mask, cells: int, seed: int) -> Int64[Tensor, "B G M"]:
    """Cells of keys that are alike: k-means of their sign hashes. Padded keys are in cell number `cells`."""
    real = mask.key_padding(key.shape[2])
    codes = hash_codes(key, BITS, seed, centre=True, real=real)
    return hamming_kmeans(codes, real, cells, BITS, ITERATIONS)


def mean_queries(query: Float[Tensor, "B H N D"], buckets: Buckets) -> Float[Tensor, "B H C D"]:
    """The mean of each bucket's queries, 0 for a bucket without any; every query is in one bucket at most."""
    assert buckets.bucket is not None
    B, H, N, _ = query.shape
    C = buckets.keys.shape[2]
    labels = torch.full((B, H, N + 1), C, device=query.device)
    of_slot = buckets.bucket[..., None].expand_as(buckets.queries)
    labels = labels.scatter(2, buckets.queries.flatten(2), of_slot.flatten(2))
    return group_mean(query, labels[..., :N], C)


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

    A cell number of `cells` is none: padding. Computed as attention of the mean queries, once for each cell, to the
    keys of the cell that are not the bucket's, with keys and values as its values.
    """
    H, M, D = query.shape[1], key.shape[2], key.shape[3]
    towards = mean_queries(query, buckets)
    C = towards.shape[2]
    inside = (members(buckets.keys, M) > 0).transpose(-1, -2)
    keys, cell_of = by_bucket(repeat_heads(cell[..., None], H)[..., 0], cells, KEYS)
    queries = cell_of[..., None] * C + torch.arange(C, device=query.device)
    both, bias = attend_pairs(
        towards.repeat(1, 1, cells, 1),
        key,
        torch.cat([key, value], dim=-1),
        Buckets(queries, torch.where(keys < M, keys, M)),
        Mask(),
        scale=scale,
        hidden=inside,
    )
    both, bias = both.unflatten(2, (cells, C)), bias.unflatten(2, (cells, C))
    centroid = both[..., :D]
    own = (centroid * towards[:, :, None]).sum(-1) * scale
    return Tail(centroid, both[..., D:], bias - own)


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
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """One softmax over the keys of a query's bucket and that bucket's tail: (out, lse)."""
    query, key, value = wide(query, key, value)
    H, M = query.shape[1], key.shape[2]
    tail = tail_of(query, key, value, buckets, cell, cells, scale)
    X, C = tail.bias.shape[2:]
    there = ~torch.isneginf(tail.bias)
    end = M + X * C
    numbers = torch.arange(M, end, device=query.device).view(X, C)
    slots = torch.where(buckets.keys < M, buckets.keys, end)
    bias = torch.where(there, tail.bias, 0.0).flatten(2)
    return attend_pairs(
        query,
        torch.cat([repeat_heads(key, H), tail.key.flatten(2, 3)], dim=2),
        torch.cat([repeat_heads(value, H), tail.value.flatten(2, 3)], dim=2),
        replace(buckets, keys=torch.cat([slots, torch.where(there, numbers, end).transpose(2, 3)], dim=3)),
        Mask(),
        scale=scale,
        key_bias=torch.cat([bias.new_zeros(*bias.shape[:2], M), bias], dim=2),
        dropout_p=dropout_p,
    )
