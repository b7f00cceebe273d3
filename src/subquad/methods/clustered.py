"""Clustered attention: one attention row for each cluster of queries.

Vyas, Katharopoulos, Fleuret 2020, "Fast Transformers with Clustered Attention", section 3.2:

    S     = clusters of the queries (k-means of sign hashes under Hamming distance)      section 3.2.2, C.1
    Q^c_j = Σ_{i ∈ S_j} Q_i / |S_j|                                                      equation 3
    A^c   = softmax(Q^c Kᵀ / √D)                                                         equation 4
    V̂_i   = (A^c V)_j  for i ∈ S_j                                                       equations 5, 6

==========  ==================
paper       here
==========  ==================
C           clusters
B           bits
L           iterations
S           labels
Q^c         centroids
==========  ==================

Deviations from the paper, each on purpose. The queries are centred before they are hashed, and the hash's directions
are orthogonal. Distances between queries, which proposition 1 is about, do not change with their mean, but the angles
that a sign hash sees do: a large common mean makes all codes alike. In a pretrained encoder this brings "i-clustered"
closer to exact attention at no cost (`benchmarks/hash_quality.py`).

Deviations from the published code: planes and starts come from a seed, the same for every item, head
and call; the start knows padding; an item with no more queries than clusters is exact. Non-causal: a centroid averages
future queries. The gradient flows through the means and A^c; the labels are constants.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.masks import Mask
from subquad.methods.base import MOST_REPEATS, Call, Method, Partial, Traits, whole, wide
from subquad.methods.full import exact
from subquad.ops.backends import choose
from subquad.ops.grouping import broadcast, group_mean
from subquad.ops.hashing import MAX_BITS, hash_codes
from subquad.ops.kmeans import hamming_kmeans
from subquad.ops.native import clustered as compiled
from subquad.ops.padding import cleared_inputs

TOO_MANY_BITS = f"a hash is one 64-bit word: at most {MAX_BITS}"


def cluster_queries(
    query: Float[Tensor, "B H N D"], mask: Mask, clusters: int, bits: int, iterations: int, seed: int
) -> Int64[Tensor, "B H N"]:
    """Cluster each head's queries: labels in [0, clusters), `clusters` for padded queries."""
    real = mask.query_padding(query.shape[2])
    codes = hash_codes(query, bits, seed, centre=True, real=real)
    return hamming_kmeans(codes, real, clusters, bits, iterations)


def clustered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    *,
    labels: Int64[Tensor, "B H N"],
    clusters: int,
) -> Partial:
    """Attention of the centroids, handed to their members; and the centroids' log-sum-exp likewise."""
    centroids = group_mean(wide(query)[0], labels, clusters)
    keys_only = Mask(keys=(*call.mask.both, *call.mask.keys))
    of_centroids, lse = exact(centroids.to(query.dtype), key, value, call.under(keys_only))
    return broadcast(of_centroids, labels), None if lse is None else broadcast(lse[..., None], labels)[..., 0]


def refusal(query: Tensor, call: Call) -> str | None:
    """Why the compiled kernels cannot take this call; None where they can."""
    if call.wants_lse:
        return "return_lse=True, and the kernels do not give the log-sum-exp"
    return compiled.refusal(query, call.dropout_p)


@dataclass(frozen=True)
class Clustered(Method):
    """Clustered attention.

    Args:
        clusters: C, clusters of queries for each head. An item with no more queries is computed exactly.
        bits: length of the hash, 1 to 63.
        iterations: Lloyd iterations of k-means.
        seed: of the hash planes. The same seed gives "i-clustered" the same clusters.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 2, 4, 300, 64)
    >>> sq.attention(q, k, v, method=sq.Clustered(clusters=25)).shape
    torch.Size([2, 4, 300, 64])
    """

    clusters: int = whole(100, least=1)
    bits: int = whole(63, least=1, most=MAX_BITS, beyond=TOO_MANY_BITS)
    iterations: int = whole(10, most=MOST_REPEATS)
    seed: int = whole(0)

    name: ClassVar[str] = "clustered"
    zeroes_padding: ClassVar[bool] = True  # they are in no cluster
    skips_padding: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        family="clusters",
        dropout="weights of the centroids, one draw for all members of a cluster",
        stochastic=True,
        order_free=False,
        exact_limit={"clusters": "N"},
        example={"clusters": 5, "bits": 15, "iterations": 3},
        complexity="O(C·M·D + N·C·iterations) time, O(N + C·D) memory (plain PyTorch: see its page)",
        source="Vyas et al. 2020, section 3.2",
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Cluster the queries, attend with the centroids, broadcast."""
        clusters = torch.sym_min(self.clusters, query.shape[2])
        hashing = {"bits": self.bits, "iterations": self.iterations, "seed": call.seed}
        if choose(cpu=refusal(query, call)) == "cpu":
            sizes = {"clusters": clusters, "topk": 0, "scale": call.scale}
            return compiled.clustered_attention(query, key, value, call.mask, **sizes, **hashing), None
        query, key, value = cleared_inputs(query, key, value, call.mask)
        labels = cluster_queries(query, call.mask, clusters, **hashing)
        return clustered_attention(query, key, value, call, labels=labels, clusters=clusters)
