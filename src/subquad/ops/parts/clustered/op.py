"""The op `clustered_attention`: one torch operator a direction for the whole method."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.ops.backends import Gradient, Op, Operator
from subquad.ops.parts.clustered import reference
from subquad.ops.tensors import token_major


@Op
def clustered_attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    real_queries: Bool[Tensor, "B N"] | None,
    real_keys: Bool[Tensor, "B M"] | None,
    *,
    clusters: int,
    topk: int,
    bits: int,
    iterations: int,
    scale: float,
    seed: int,
    labels: Int64[Tensor, "B H N"] | None = None,
    dropout_p: float = 0.0,
    wants_lse: bool = False,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"] | None]:
    """Clustered attention, equations 3 to 6 of Vyas et al. 2020, or improved with `topk` > 0, equations 9 to 17.

        Q^c_j = Σ_{i ∈ S_j} Q_i / |S_j|,   A^c = softmax(scale·Q^c Kᵀ),   V̂_i = (A^c V)_j for i ∈ S_j
        topk: A^c on the topk largest keys of j is replaced by its mass there times each member's own softmax on them

    S are at most `clusters` clusters of the queries by their sign hashes (`hash_codes`, `hamming_kmeans`), or what
    `labels` say: numbers in [0, clusters), read for queries that are not padding. Padded queries are in no cluster and
    get 0. lse_i = ln Σ_l e^{scale·Q^c_j·K_l}, or ln of the sum over its own top keys divided by their mass; None unless
    it is wanted. The gradient flows through the means, A^c and lse; the labels are constants. Compiled kernels never
    store the C×M weights of the centroids.
    """
    out, lse = reference.clustered_attention(
        query,
        key,
        value,
        real_queries,
        real_keys,
        clusters=clusters,
        topk=topk,
        bits=bits,
        iterations=iterations,
        scale=scale,
        seed=seed,
        labels=labels,
        dropout_p=dropout_p,
    )
    return out, lse if wants_lse else None


@clustered_attention.compiled
def _(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real_queries: Tensor | None,
    real_keys: Tensor | None,
    *,
    clusters: int,
    topk: int,
    bits: int,
    iterations: int,
    scale: float,
    seed: int,
    labels: Tensor | None = None,
    dropout_p: float = 0.0,
    wants_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    given = query, key, value, real_queries, real_keys, labels, clusters, torch.sym_min(topk, key.shape[2])
    out, *_, lse = clustered_forward(backend, *given, bits, iterations, scale, seed, wants_lse)
    return out, lse if wants_lse else None


@Operator
def clustered_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_real: Tensor | None,
    key_real: Tensor | None,
    labels: Tensor | None,
    clusters: int,
    topk: int,
    bits: int,
    iterations: int,
    scale: float,
    seed: int,
    wants_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the output, what the backward pass needs (order, offsets, top, centroids, rest, lse, mass), and the
    queries' own log-sum-exp, empty unless it is wanted.
    """
    B, H, N, D = query.shape
    E, C = value.shape[3], clusters
    if topk < 0 or clusters < 1:
        raise ValueError(f"clustered_forward: clusters={C} and topk={topk}, but there must be 1 and 0 at least")
    order = query.new_empty(B, H, N, dtype=torch.int32)
    offsets = query.new_empty(B, H, C + 1, dtype=torch.int32)
    top = query.new_empty(B, H, C, topk, dtype=torch.int32)
    centroids, rest, lse, mass = (
        query.new_empty(B, H, C, *width, dtype=torch.float32) for width in ((D,), (E,), (), ())
    )
    of_queries = query.new_empty(B, H, N if wants_lse else 0, dtype=torch.float32)
    return token_major(query, E), order, offsets, top, centroids, rest, lse, mass, of_queries


clustered_backward = Gradient(clustered_forward, "query", "key", "value", named="clustered attention")


@clustered_forward.flops
def _(x: Any) -> int:
    """Operations of the products: hash, logits, weighted values."""
    B, H, N, D = x.query
    hashes = 2 * B * H * N * D * x.bits if x.labels is None else 0
    return hashes + 2 * _pairs(x) * (D + x.value[3])


@clustered_backward.flops
def _(x: Any) -> int:
    """The logits again and the gradients of both their sides; the gradients of weights and values."""
    return 2 * _pairs(x) * (3 * x.query[3] + 2 * x.value[3])


def _pairs(x: Any) -> int:
    """The query-key pairs that are computed: of centroids with all keys, of queries with their top keys."""
    B, H, N, _ = x.query
    return B * H * (x.clusters * x.value[2] + N * x.topk)
