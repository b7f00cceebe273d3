"""Clusters of queries and cells of keys over the tokens of all ranks: `query_clusters` and `key_cells`.

moments      counts, means and spreads; the covariance of the keys          1 exchange
k-means      the first centroids, then each iteration's votes               1 + iterations
refine       sums of the clusters' members, each round                      1 each
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.core.randomness import orthogonal
from subquad.distributed.selection.kmeans import Codes, kmeans_of_ranks
from subquad.distributed.selection.moments_of_ranks import Tokens, Whole, moments_of_ranks
from subquad.distributed.together import add_together
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.attention.sums.op import group_sums
from subquad.kernels.selection.cells.reference import BITS, ITERATIONS
from subquad.kernels.selection.clusters.reference import JITTER
from subquad.kernels.selection.shards.op import assign_means, centred_codes
from subquad.kernels.selection.shards.reference import Term
from subquad.kernels.tokens.heads import repeat_heads


@dataclass(frozen=True)
class ClusterSettings:
    """The settings of `query_clusters`."""

    clusters: int
    bits: int
    iterations: int
    seed: int
    space: str = "queries"
    refine: int = 0


@torch.no_grad()
def clusters_of_ranks(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    valid: tuple[Bool[Tensor, "B N"] | None, Bool[Tensor, "B M"] | None],
    split: TokenSplit,
    settings: ClusterSettings,
    cells: int | None = None,
) -> tuple[Int64[Tensor, "B H N"], Int64[Tensor, "B G M"] | None]:
    """The cluster of each of this rank's queries, and with `cells` the cell of each of its keys."""
    by_logits = settings.space == "logits"
    tokens = [Tokens(query, valid[0])]
    if by_logits or cells is not None:
        tokens.append(Tokens(key, valid[1], by_logits))
    if cells is not None:
        tokens.append(Tokens(value, valid[1]))
    of_query, *others = moments_of_ranks(split, *tokens)
    metric = _metric(others[0], query.shape[1]) if by_logits else None
    problems = [_query_codes(tokens[0], of_query, metric, settings)]
    if cells is not None:
        codes = _cell_codes(key, value, valid[1], others[0], others[1], settings.seed)
        problems.append(Codes(codes, valid[1], others[0], cells, ITERATIONS))
    labels, *cell = kmeans_of_ranks(problems, split)
    if settings.clusters < split.tokens:  # else each query is its own cluster
        for _ in range(settings.refine):
            labels = _moved(labels, query, problems[0], metric, split)
    return labels, cell[0] if cell else None


@torch.no_grad()
def clusters_by_moments(
    tokens: Tokens, whole: Whole, split: TokenSplit, settings: ClusterSettings
) -> Int64[Tensor, "B H N"]:
    """The cluster of each of this rank's tokens, of which the moments are known, by their directions alone."""
    (labels,) = kmeans_of_ranks([_query_codes(tokens, whole, None, settings)], split)
    return labels


def _metric(of_keys: Whole, heads: int) -> Float[Tensor, "B {heads} D D"]:
    """Σ + ε of each head's keys, up to a positive factor."""
    covariance = of_keys.covariance
    assert covariance is not None
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    ones = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    # Keys that are all equal have no covariance: any metric will do, because every query weighs them alike.
    metric = torch.where(mean > 0, covariance / torch.where(mean > 0, mean, 1.0) + JITTER * ones, ones)
    return repeat_heads(metric, heads)


def _query_codes(queries: Tokens, whole: Whole, metric: Tensor | None, settings: ClusterSettings) -> Codes:
    """Sign hashes of (q − mean q)·L with L Lᵀ the metric."""
    query, valid, _ = queries
    planes = _planes(settings.seed, settings.bits, query.shape[3], query)
    if metric is not None:
        factor, _ = torch.linalg.cholesky_ex(metric)
        planes = (planes.double() @ factor.mT).to(planes.dtype)
    codes = centred_codes((Term(query, whole.mean, torch.ones_like(whole.squares)),), planes, valid)
    return Codes(codes, valid, whole, settings.clusters, settings.iterations)


def _cell_codes(
    key: Tensor, value: Tensor, valid: Tensor | None, of_keys: Whole, of_values: Whole, seed: int
) -> Int64[Tensor, "B G M"]:
    """Sign hashes of [(k − mean k)/σ_k, (v − mean v)/σ_v]."""

    def standardised(x: Tensor, whole: Whole) -> Term:
        spread = whole.squares
        return Term(x, whole.mean, 1 / torch.where(spread > 0, spread.sqrt(), 1.0))

    planes = _planes(seed, BITS, key.shape[3] + value.shape[3], key)
    return centred_codes((standardised(key, of_keys), standardised(value, of_values)), planes, valid)


def _planes(seed: int, bits: int, width: int, x: Tensor) -> Float[Tensor, "1 1 {bits} {width}"]:
    like = torch.empty(0, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return orthogonal(seed, bits, width, like=like)[None, None]


def _moved(labels: Tensor, query: Tensor, of_codes: Codes, metric: Tensor | None, split: TokenSplit) -> Tensor:
    """A round of Lloyd's algorithm on the queries themselves: the means of the clusters, then each to the nearest."""
    whole, C = of_codes.whole, of_codes.clusters
    sums, sizes = group_sums(query, labels, C)
    sums, sizes = add_together([sums, sizes.to(sums.dtype)], split.group)
    # Distances in units of the queries' spread, so that squares cannot overflow.
    means = sums.double() / sizes.clamp(min=1).unsqueeze(-1) - whole.mean.unsqueeze(2)
    unit = torch.where(whole.squares > 0, whole.squares, 1.0)[..., None, None]
    directions = (means if metric is None else means @ metric) / unit
    halves = ((means * directions).sum(-1) / 2).masked_fill(sizes == 0, torch.inf)
    directions, halves = directions.mT.to(sums.dtype).contiguous(), halves.to(sums.dtype)
    return of_codes.settled(assign_means(query, whole.mean, directions, halves, of_codes.valid))
