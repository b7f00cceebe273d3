"""Clusters of queries on GPUs, without a copy of the queries in another space.

With y = f·q − μ, the queries less their mean, and the covariance of the keys, Σ = L Lᵀ:

    hashes      sign((y L) Wᵀ) = sign(y (W Lᵀ)ᵀ)                        directions W Lᵀ of each head
    distances   ‖y L − c L‖² = yᵀΣy − 2 y·(Σc) + cᵀΣc                   the mean c that is nearest in the metric Σ

For the space of the queries themselves, Σ and L are 1.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.choose.clusters.op import cluster_labels, query_clusters
from subquad.ops.choose.clusters.reference import JITTER
from subquad.ops.choose.hashing.triton import SLICE, Projected, sign_hash
from subquad.ops.choose.kmeans.triton import Items, fill_labels, refusal_of_sizes, settled
from subquad.ops.heads import repeat_heads
from subquad.ops.triton import refusal_of
from subquad.ops.triton.groups import group_means, group_order
from subquad.ops.triton.launch import dot, launch, load_rows, padded, rows, strides, tile
from subquad.ops.triton.moments import Moments, covariance, load_centred, moments
from subquad.ops.triton.recording import Work
from subquad.randomness import orthogonal

QUERIES, MEANS = 64, 32  # of a tile; with 64 means, scores and TF32 parts do not fit into an A100's registers


@query_clusters.refusal("triton")
def refusal(query: Tensor, key: Tensor, *_: object, clusters: int, **__: object) -> str | None:
    """Why the kernels cannot take these queries; None where they can."""
    return refusal_of(query, key) or refusal_of_sizes(query.shape[2], clusters)


@cluster_labels.on("triton")
def compute(labels: Tensor, x: Any) -> None:
    """The Triton backend of `query_clusters`."""
    query, items = rows(x.query), Items.of(x.query_real, x.counts, x.clusters, labels)
    of, planes = (
        moments(query, x.query_real),
        orthogonal(x.seed, x.bits, query.shape[3], like=query.new_empty(0).float()),
    )
    metric = None
    if x.space == "logits":
        metric, factor = metric_of_keys(x.key, x.key_real, query.shape[1])
        planes = planes @ factor.mT
    codes = torch.empty_like(labels)
    sign_hash(codes, x.query_real, Projected(query, planes, of))
    fill_labels(labels, codes, items, x.iterations)
    if x.clusters < query.shape[2]:  # else each query is its own cluster
        for _ in range(x.refine):
            move(labels, query, of, metric, items)


def metric_of_keys(key: Tensor, real: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """Σ and L of each query head, up to a positive factor: the covariance of its keys, with the jitter."""
    spread = covariance(key, real, moments(key, real)).double()
    mean = spread.diagonal(dim1=-2, dim2=-1).mean(-1)
    ones = torch.eye(key.shape[3], dtype=torch.float64, device=key.device)
    spread = spread + torch.where(mean > 0, JITTER * mean, 1.0)[..., None, None] * ones
    factor, _ = torch.linalg.cholesky_ex(spread)
    return repeat_heads(spread.float(), heads), repeat_heads(factor.float(), heads)


def move(labels: Tensor, query: Tensor, of: Moments, metric: Tensor | None, items: Items) -> None:
    """One round of Lloyd's algorithm: the means of the clusters, then each query to the nearest, in place."""
    (B, H, N, D), C = query.shape, items.clusters
    order, offsets = group_order(labels, C)
    assert of.mean is not None
    means = group_means(query, order, offsets) * of.factor[..., None, None] - of.mean[:, :, None]
    directions = means if metric is None else means @ metric
    halves = (means * directions).sum(-1) / 2
    halves = halves.masked_fill(offsets.diff(dim=-1) == 0, torch.inf)  # an empty cluster is nearest to nothing
    tokens = tile(N, QUERIES)
    launch(
        nearest_means,
        (triton.cdiv(N, tokens), B * H),
        work=Work(B * H * N * C * D, B * H * (N * (D * query.element_size() + 8) + 4 * C * D)),
        x=query,
        **strides("x", query),
        **of.arguments(),
        directions=directions,
        halves=halves,
        labels=labels,
        **items.arguments(),
        H=H,
        N=N,
        C=C,
        D=D,
        SLICE=min(SLICE, padded(D)),
        TOKENS=tokens,
        MEANS=tile(C, MEANS),
    )


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
    labels,
    real,
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
    there = token < N
    x += head // H * x_b + head % H * x_h
    directions += head * C * D
    best = tl.full((TOKENS, MEANS), -float("inf"), tl.float32)
    found = tl.zeros((TOKENS, MEANS), tl.int32)
    for first in range(0, C, MEANS):
        c = first + tl.arange(0, MEANS)
        score = tl.zeros((TOKENS, MEANS), tl.float32)
        for start in range(0, D, SLICE):
            y = load_centred(x, x_n, token, there, factor, mean, head, start, D, SLICE)
            score += dot(y, tl.trans(load_rows(directions + start, D, c, c < C, D - start, SLICE)))
        score -= tl.load(halves + head * C + c, mask=c < C, other=float("inf"))[None, :]
        found = tl.where(score > best, first, found)
        best = tl.where(score > best, score, best)
    c = tl.where(best == tl.max(best, 1)[:, None], found + tl.arange(0, MEANS)[None, :], C - 1)
    label = settled(tl.min(c, 1).to(tl.int64), head // H, token, N, C, there, real, rank, count, wanted)
    tl.store(labels + head * N + token, label, mask=there)
