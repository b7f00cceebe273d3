"""The op `query_clusters`."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.ops.backends import Op, Operator
from subquad.ops.choose.clusters import reference


@Op
def query_clusters(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    real_queries: Bool[Tensor, "B N"] | None,
    real_keys: Bool[Tensor, "B M"] | None,
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

    `space` says what is clustered: "queries" q − mean q, or "logits" (q − mean q) L with L Lᵀ = Σ + ε, where Σ is the
    covariance of the item's keys. Two queries attend alike where q·Kᵀ is alike, up to what all keys have in common,
    which softmax does not see; and for ε = 0 they differ in that by

        ‖(q − q′)(K − mean K)ᵀ‖ = √M · ‖(q − q′) L‖

    ε is 10⁻⁴ of the mean variance. An item with no more real queries than clusters: each is its own cluster. The labels
    are constants: nothing is differentiated. Backends agree up to rounding. With `counts`, from 1 to `clusters`, each
    item has that number of clusters, and `clusters` is the label of padding alone.
    """
    return reference.query_clusters(
        query,
        key,
        real_queries,
        real_keys,
        space=space,
        clusters=clusters,
        bits=bits,
        iterations=iterations,
        refine=refine,
        seed=seed,
        counts=counts,
    )


@query_clusters.compiled
def _(
    backend: str,
    query: Tensor,
    key: Tensor,
    real_queries: Tensor | None,
    real_keys: Tensor | None,
    *,
    space: str,
    clusters: int,
    bits: int,
    iterations: int,
    refine: int,
    seed: int,
    counts: Tensor | None = None,
) -> Tensor:
    given = query.detach(), key.detach(), real_queries, real_keys, counts
    return cluster_labels(backend, *given, space, clusters, bits, iterations, refine, seed)


@Operator
def cluster_labels(
    query: Tensor,
    key: Tensor,
    query_real: Tensor | None,
    key_real: Tensor | None,
    counts: Tensor | None,
    space: str,
    clusters: int,
    bits: int,
    iterations: int,
    refine: int,
    seed: int,
) -> Tensor:
    """Allocate the labels."""
    if clusters < 1:
        raise ValueError(f"query_clusters: clusters={clusters}, but there must be 1 at least")
    return query.new_empty(query.shape[:3], dtype=torch.int64)
