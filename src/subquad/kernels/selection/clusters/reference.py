"""Clusters of queries, in plain PyTorch."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.selection.group_means import group_mean, group_sizes
from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.selection.hashing.reference import centred
from subquad.kernels.selection.kmeans.op import hamming_kmeans
from subquad.kernels.selection.kmeans.reference import hamming_kmeans as kmeans_of_counts
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.transforms import in_onnx_export

JITTER = 1e-4  # share of the mean variance that is added to each, so that the covariance has a Cholesky factor


def query_clusters(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    query_valid: Bool[Tensor, "B N"] | None,
    key_valid: Bool[Tensor, "B M"] | None,
    *,
    space: str,
    clusters: int,
    bits: int,
    iterations: int,
    refine: int,
    seed: int,
    counts: Int64[Tensor, "B"] | None = None,
) -> Int64[Tensor, "B H N"]:
    """K-means of the queries, head by head: labels in [0, clusters), and `clusters` for padding.

    `iterations` of Lloyd's algorithm on sign hashes of `bits` bits (`hash_codes`, `hamming_kmeans`), then `refine`
    rounds on the vectors themselves: means of the clusters, then each query to the nearest mean.

    `space` is what is clustered: "queries" q − mean q, or "logits" (q − mean q) L with L Lᵀ = Σ + ε, where Σ is the
    covariance of the item's keys. Two queries attend alike where q·Kᵀ is alike, up to what all keys have in common,
    which softmax does not see; and for ε = 0 they differ in that by

        ‖(q − q′)(K − mean K)ᵀ‖ = √M · ‖(q − q′) L‖

    ε is 10⁻⁴ of the mean variance. An item with no more real queries than clusters: each is its own cluster. The labels
    are constants: nothing is differentiated. Backends agree up to rounding. With `counts`, from 1 to `clusters`, each
    item has that number of clusters, and `clusters` is the label of padding alone.
    """
    mapped = scaled(query, query_valid)
    if space == "logits":
        mapped = mapped @ repeat_heads(logit_factor(key, key_valid), query.shape[1])
    codes = hash_codes(mapped, bits, seed)
    if counts is None:
        labels = hamming_kmeans(codes, query_valid, clusters, bits, iterations)
    else:
        labels = kmeans_of_counts(codes, query_valid, clusters, bits, iterations, counts)
    if not in_onnx_export() and clusters >= query.shape[2]:  # each query is its own cluster
        return labels
    few = clusters if counts is None else counts
    alone = _at_most(few, query_valid)
    for _ in range(refine):
        nearest = nearest_mean(mapped, labels, clusters)
        nearest = nearest if query_valid is None else torch.where(query_valid[:, None], nearest, clusters)
        labels = nearest if alone is None else torch.where(alone, labels, nearest)
    return labels


def logit_factor(key: Float[Tensor, "B G M D"], valid: Bool[Tensor, "B M"] | None) -> Float[Tensor, "B G D D"]:
    """L with L Lᵀ = Σ + jitter, the covariance of each item's real keys, up to a positive factor."""
    upcast = scaled(key, valid).double()
    count = torch.full((key.shape[0],), key.shape[2], device=key.device) if valid is None else valid.sum(1)
    covariance = upcast.mT @ upcast / count.clamp(min=1)[:, None, None, None]
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)
    ones = torch.eye(key.shape[3], dtype=upcast.dtype, device=key.device)
    # Keys that are all equal have no covariance: any factor will do, because every query weighs them alike.
    jitter = torch.where(mean > 0, JITTER * mean, 1.0)[..., None, None] * ones
    return cholesky(covariance + jitter).to(torch.promote_types(key.dtype, torch.float32))


def cholesky(matrix: Float[Tensor, "B G D D"]) -> Float[Tensor, "B G D D"]:
    """The lower triangular L with L Lᵀ = `matrix`: torch's, or column by column for ONNX, which has no operator."""
    if not in_onnx_export():
        factor, _ = torch.linalg.cholesky_ex(matrix)
        return factor
    columns, rows = [], torch.arange(matrix.shape[-1], device=matrix.device)
    for number in range(matrix.shape[-1]):
        column = matrix[..., number] / matrix[..., number, number, None].sqrt()
        columns.append(torch.where(rows < number, 0.0, column))  # what is left above the diagonal is rounding
        matrix = matrix - columns[-1][..., :, None] * columns[-1][..., None, :]
    return torch.stack(columns, dim=-1)


def scaled(x: Float[Tensor, "B H N D"], valid: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B H N D"]:
    """Vectors less their head's mean, divided by the largest number among them, so that squares cannot overflow."""
    x = centred(x.detach(), valid)
    x = x if valid is None else x.masked_fill(~valid[:, None, :, None], 0.0)
    largest = x.abs().amax((2, 3), keepdim=True)
    return x / torch.where(largest > 0, largest, 1.0)


def nearest_mean(x: Float[Tensor, "B H N D"], labels: Int64[Tensor, "B H N"], clusters: int) -> Int64[Tensor, "B H N"]:
    """The cluster whose mean is nearest to each vector, the lowest of equally near ones; one without members is not."""
    means = group_mean(x, labels, clusters)
    halves = means.square().sum(-1) / 2
    halves = halves.masked_fill(group_sizes(labels, clusters) == 0, torch.inf)
    return (halves[:, :, None] - x @ means.mT).argmin(-1)


def _at_most(few: int | Tensor, valid: Bool[Tensor, "B N"] | None) -> Bool[Tensor, "B 1 1"] | None:
    """Items with no more real queries than clusters, or than this item's clusters; None: no item."""
    return None if valid is None else (valid.sum(1) <= few)[:, None, None]
