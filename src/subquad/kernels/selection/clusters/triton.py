"""Clusters of queries on GPUs, without a copy of the queries in another space.

With y = f·q − μ, the queries less their mean, and the covariance of the keys, Σ = L Lᵀ:

    hashes      sign((y L) Wᵀ) = sign(y (W Lᵀ)ᵀ)                        directions W Lᵀ of each head
    distances   ‖y L − c L‖² = yᵀΣy − 2 y·(Σc) + cᵀΣc                   the mean c that is nearest in the metric Σ

For the space of the queries themselves, Σ and L are 1.

Queries of 16 bits meet the tensor cores as they are, not centred. A direction w = Σc, less its scale s = max |w|, is
the sum of two vectors of 16 bits, h + l, which hold all but its last bits:

    y·w = f·s·(q·h + q·l) − μ·w
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.selection.clusters.op import cluster_labels, query_clusters
from subquad.kernels.selection.clusters.reference import JITTER
from subquad.kernels.selection.hashing.triton import SLICE, Projected, planes_of, sign_hash
from subquad.kernels.selection.kmeans.triton import KMeansItems, fill_labels, refusal_of_sizes, settled
from subquad.kernels.triton import refusal_of
from subquad.kernels.triton.covariance import covariance
from subquad.kernels.triton.groups import ROWS, Members, load_sums
from subquad.kernels.triton.launch import dot, launch, load_rows, padded, rows, store_rows, strides, tile
from subquad.kernels.triton.moments import Moments, load_centred, moments, moments_of
from subquad.kernels.triton.recording import LaunchCost

QUERIES, MEANS = 64, 32  # of a tile in fp32; with 64 means, TF32 parts do not fit into an A100's registers


@query_clusters.refusal("triton")
def refusal(x: Any) -> str | None:
    """The reason why the kernels cannot take these queries; None if they can."""
    return refusal_of(x.query, x.key) or refusal_of_sizes(x.query.shape[2], x.clusters)


@cluster_labels.on("triton")
def compute(labels: Tensor, x: Any) -> None:
    """The Triton backend of `query_clusters`."""
    query, items, width = rows(x.query), KMeansItems.make(x.query_valid, x.counts, x.clusters, labels), x.query.shape[3]
    metric = None
    if x.space == "logits":
        of_queries, of_keys = moments_of((query, x.query_valid), (x.key, x.key_valid))
        metric = covariance(x.key, x.key_valid, of_keys, JITTER)
        factor, _ = torch.linalg.cholesky_ex(metric)
        planes = planes_of(x.seed, x.bits, width, query.device, torch.float64) @ factor.mT
    else:
        of_queries, planes = moments(query, x.query_valid), planes_of(x.seed, x.bits, width, query.device)
    codes = torch.empty_like(labels)
    sign_hash(codes, x.query_valid, Projected(query, planes, of_queries))
    fill_labels(labels, codes, items, x.iterations)
    if x.clusters < query.shape[2]:  # else each query is its own cluster
        for _ in range(x.refine):
            move(labels, query, of_queries, metric, items)


def move(labels: Tensor, query: Tensor, of_queries: Moments, metric: Tensor | None, items: KMeansItems) -> None:
    """One round of Lloyd's algorithm: the means of the clusters, then each query to the nearest, in place.

    `metric` is Σ of each key head, (B,G,D,D), in any precision.
    """
    (B, H, N, D), C = query.shape, items.clusters
    members = Members.from_labels(labels, C, query)
    halves = query.new_empty(B, H, C, dtype=torch.float32)
    split = query.element_size() == 2
    directions = query.new_empty(B, H, C, 2 * D) if split else query.new_empty(B, H, C, D)
    scales = torch.empty_like(halves) if split else None
    parts = 2 if split else 1
    launch(
        directions_of_means,
        (triton.cdiv(C, ROWS), B * H),
        num_warps=8,
        cost=LaunchCost(B * H * C * D * D, 4 * B * H * (C + D) * D),
        **{**members.arguments(), **of_queries.arguments(), "metric": metric},
        **{"share": 1 if metric is None else H // metric.shape[1], "directions": directions},
        **{"halves": halves, "scales": scales},
        **{"D": D, "WIDTH": padded(D), "SLICE": 16, "GROUPS": ROWS},
    )
    tokens = tile(N, QUERIES)
    launch(
        nearest_means,
        (triton.cdiv(N, tokens), B * H),
        cost=LaunchCost(parts * B * H * N * C * D, B * H * (N * (D * query.element_size() + 8) + 4 * C * D)),
        x=query,
        **strides("x", query),
        **of_queries.arguments(),
        directions=directions,
        halves=halves,
        scales=scales,
        labels=labels,
        **items.arguments(),
        H=H,
        N=N,
        C=C,
        D=D,
        SLICE=min(parts * SLICE, padded(D)),
        TOKENS=tokens,
        MEANS=tile(C, parts * MEANS),
    )


@triton.jit
def load_means(sums, counts, factor, mean, head, c, C, D, runs, start, WIDTH: tl.constexpr):
    """The components from `start` on of the means of clusters, as means of y, and how many members there are."""
    total, count = load_sums(sums, counts, head, c, C, D, runs, start, WIDTH)
    column = start + tl.arange(0, WIDTH)
    shift = tl.load(mean + head * D + column, mask=column < D, other=0.0)
    return total * (tl.load(factor + head) / tl.maximum(count, 1))[:, None] - shift[None, :], count


@triton.jit
def directions_of_means(
    sums,
    counts,
    factor,
    mean,
    metric,
    share,
    directions,
    halves,
    scales,
    C,
    D,
    runs,
    WIDTH: tl.constexpr,
    SLICE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Σc and cᵀΣc / 2 of the means c of a tile of clusters; ∞ for an empty cluster, which is nearest to nothing.

    With `scales` Σc as two parts, and cᵀΣc / 2 + μ·Σc.
    """
    head = tl.program_id(1).to(tl.int64)
    cluster = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    means, count = load_means(sums, counts, factor, mean, head, cluster, C, D, runs, 0, WIDTH)
    direction = means
    if metric is not None:
        direction = tl.zeros_like(means)
        metric += (tl.program_id(1) // share).to(tl.int64) * D * D  # a division in 64 bits would spill registers
        for start in range(0, D, SLICE):
            part, _ = load_means(sums, counts, factor, mean, head, cluster, C, D, runs, start, SLICE)
            row = start + tl.arange(0, SLICE)
            direction += dot(part, load_rows(metric, D, row, row < D, D, WIDTH).to(tl.float32))
    half = tl.sum(means * direction, 1) / 2
    if scales is None:
        store_rows(directions + head * C * D, D, cluster, cluster < C, direction, D, WIDTH)
    else:
        column = tl.arange(0, WIDTH)
        half += tl.sum(tl.load(mean + head * D + column, mask=column < D, other=0.0)[None, :] * direction, 1)
        largest = tl.max(tl.abs(direction), 1)
        largest = tl.where(largest > 0, largest, 1.0)
        direction /= largest[:, None]
        high = direction.to(directions.dtype.element_ty)
        low = direction - high.to(tl.float32)
        directions += head * C * 2 * D
        store_rows(directions, 2 * D, cluster, cluster < C, high, D, WIDTH)
        store_rows(directions + D, 2 * D, cluster, cluster < C, low, D, WIDTH)
        tl.store(scales + head * C + cluster, largest * tl.load(factor + head), mask=cluster < C)
    half = tl.where(count > 0, half, float("inf"))
    tl.store(halves + head * C + cluster, half, mask=cluster < C)


@triton.jit
def nearest_means(
    x,
    x_b,
    x_h,
    x_n,
    factor,
    mean,
    directions,
    halves,
    scales,
    labels,
    valid,
    rank,
    count,
    wanted,
    H,
    N,
    C,
    D,
    SLICE: tl.constexpr,
    TOKENS: tl.constexpr,
    MEANS: tl.constexpr,
):
    """labels[token] = argmax_c y·direction_c − half_c, the lowest c of equal ones. One program takes a tile of tokens.

    Each column of a tile of scores keeps its best one and the first tile that has it; columns are compared at the end.
    A score that is NaN is never the best, and a token that has no other is of cluster 0.
    """
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    present = token < N
    x += head // H * x_b + head % H * x_h
    directions += head * C * (D if scales is None else 2 * D)
    best = tl.full((TOKENS, MEANS), -float("inf"), tl.float32)
    nearest = tl.zeros((TOKENS, MEANS), tl.int32)
    for first in range(0, C, MEANS):
        c = first + tl.arange(0, MEANS)
        score = tl.zeros((TOKENS, MEANS), tl.float32)
        for start in range(0, D, SLICE):
            if scales is None:
                y = load_centred(x, x_n, token, present, factor, mean, head, start, D, SLICE)
                score += dot(y, tl.trans(load_rows(directions + start, D, c, c < C, D - start, SLICE)))
            else:
                vectors = load_rows(x + start, x_n, token, present, D - start, SLICE)
                for part in tl.static_range(2):
                    means = directions + part * D + start
                    score += dot(vectors, tl.trans(load_rows(means, 2 * D, c, c < C, D - start, SLICE)))
        if scales is not None:
            score *= tl.load(scales + head * C + c, mask=c < C, other=0.0)[None, :]
        score -= tl.load(halves + head * C + c, mask=c < C, other=float("inf"))[None, :]
        nearest = tl.where(score > best, first, nearest)
        best = tl.where(score > best, score, best)
    c = tl.where(best == tl.max(best, 1)[:, None], nearest + tl.arange(0, MEANS)[None, :], C - 1)
    label = settled(tl.min(c, 1).to(tl.int64), head // H, token, N, C, present, valid, rank, count, wanted)
    tl.store(labels + head * N + token, label, mask=present)
