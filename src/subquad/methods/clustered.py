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
closer to exact attention at no cost (`benchmarks/hash_quality.py`). Not the paper's either are `space="logits"` and
`refine`, which the defaults leave out: what must be alike in a cluster is q Kᵀ (proposition 1), and a hash is coarse.

Deviations from the published code: planes and starts come from a seed, the same for every item, head
and call; the start knows padding; an item with no more queries than clusters is exact. A centroid
averages later queries too, so the method is causal by halves alone (`methods.core.halves`). The gradient flows through
the means and A^c; the labels are constants.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.core.versions import sym_min
from subquad.kernels.attention.clustered.op import clustered_attention
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.selection.group_means import broadcast, group_mean
from subquad.kernels.selection.hashing.op import MAX_BITS
from subquad.methods.core.halves import ByHalves, block_length, last_rows, queries_together
from subquad.methods.core.method import MOST_REPEATS, Call, Partial, Traits, choice, upcast, whole
from subquad.methods.core.onnx import OnnxSupport
from subquad.methods.core.residual import Residual

SPACES = ("queries", "logits")  # of `query_clusters`; the first is the paper's
TOO_MANY_BITS = f"a hash is one 64-bit word: at most {MAX_BITS}"


def clusters_of(query: Tensor, key: Tensor, call: Call, method: Any) -> Tensor:
    """The cluster of each query; as many as there are clusters for padding."""
    valid = call.mask.query_padding(query.shape[2]), call.mask.key_padding(key.shape[2])
    with torch.no_grad():
        settings = {"space": method.space, "refine": method.refine, **_clustering(query.shape[2], call, method)}
        return query_clusters(query, key, *valid, **settings)


def _clustering(N: int, call: Call, method: Any) -> dict[str, Any]:
    clusters = sym_min(method.clusters, N)
    return {"clusters": clusters, "bits": method.bits, "iterations": method.iterations, "seed": call.seed}


class ClustersQueries(ByHalves):
    """A method of queries in clusters: centroids attend, and with `top_keys` each query to the top keys by itself."""

    clusters: int
    bits: int
    iterations: int
    space: str
    refine: int

    def top_keys(self) -> int:
        """The number of its cluster's keys that each query attends to individually."""
        return 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call, labels: Tensor | None = None) -> Partial:
        """Cluster the queries, unless their `labels` are known, attend with the centroids, broadcast."""
        N, mask = query.shape[2], call.mask
        if labels is None and (self.space != "queries" or self.refine > 0):
            labels = clusters_of(query, key, call, self)  # else the op itself finds the paper's clusters
        return clustered_attention(
            query,
            key,
            value,
            mask.query_padding(N),
            mask.key_padding(key.shape[2]),
            **_clustering(N, call, self),
            topk=self.top_keys(),
            scale=call.scale,
            labels=labels,
            dropout_p=call.dropout_p,
            wants_lse=call.wants_lse,
        )


@dataclass(frozen=True)
class Clustered(ClustersQueries):
    """Clustered attention: queries of a cluster share the attention of their centroid.

    Args:
        clusters: C, clusters of queries for each head. An item with no more queries is computed exactly.
        bits: length of the hash, 1 to 63.
        iterations: Lloyd iterations of k-means.
        seed: random seed of the hash planes. The same seed gives "i-clustered" the same clusters.
        space: what is clustered: "queries", the paper's, or "logits", so that queries with alike q·Kᵀ are together.
        refine: rounds of k-means on the vectors themselves, after that on their hashes.
        block: under a causal mask, tokens of a block on the diagonal, whose attention is exact. 0: 1,024, and 2,048 in
            dtypes of 16 bits.
        last: under a causal mask, queries at the end of each item that are exact.
        queries: under a causal mask, which queries are taken together: of a whole "rectangle", or of each "block".

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 2, 4, 300, 64)
    >>> sq.attention(q, k, v, method=sq.Clustered(clusters=25)).shape
    torch.Size([2, 4, 300, 64])
    """

    clusters: int = whole(100, least=1)
    bits: int = whole(63, least=1, most=MAX_BITS, beyond=TOO_MANY_BITS)
    iterations: int = whole(10, most=MOST_REPEATS)
    seed: int = whole(0)
    space: str = choice(*SPACES)
    refine: int = whole(0, most=MOST_REPEATS)
    block: int = block_length()
    last: int = last_rows()
    queries: str = queries_together()

    name: ClassVar[str] = "clustered"
    onnx: ClassVar[OnnxSupport] = "without causal masks"
    traits: ClassVar[Traits] = Traits(
        family="clusters",
        causal="values-only",
        by_halves=True,
        dropout="weights of the centroids, one draw for all members of a cluster",
        stochastic=True,
        order_free=False,
        exact_limit={"clusters": "N"},
        example={"clusters": 5, "bits": 15, "iterations": 3, "block": 4, "last": 3},
        complexity="O(C·M·D + N·C·iterations) time, O(N + C·D) memory (plain PyTorch: see its page)",
        source="Vyas et al. 2020, section 3.2",
        zeroes_padding=True,  # they are in no cluster
        skips_padding=True,
    )

    def residual(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Residual:
        """Attention of the centroids to all keys; a key's weight is that for the centroid of the query's cluster."""
        labels = clusters_of(query, key, call, self)
        partial = self.attend(query, key, value, call, labels)
        query, key = upcast(query, key)
        of_query = broadcast(group_mean(query, labels, sym_min(self.clusters, query.shape[2])), labels) * call.scale
        return Residual(partial, of_query, key, by_features=False)
