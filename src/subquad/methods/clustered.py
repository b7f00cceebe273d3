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
from torch import Tensor

from subquad.methods.base import MOST_REPEATS, Call, Method, Traits
from subquad.ops.choose.hashing.op import check_bits
from subquad.ops.packing import per_segment
from subquad.ops.parts.clustered.op import clustered_attention


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

    clusters: int = 100
    bits: int = 63
    iterations: int = 10
    seed: int = 0

    name: ClassVar[str] = "clustered"
    zeroes_padding: ClassVar[bool] = True  # they are in no cluster
    skips_padding: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        causal="no",
        cross=True,
        key_padding=True,
        segments=True,
        gqa=True,
        dropout="weights of the centroids, one draw for all members of a cluster",
        stochastic=True,
        order_free=False,
        subquadratic=True,
        exact_limit={"clusters": "N"},
        example={"clusters": 5, "bits": 15, "iterations": 3},
        complexity="O(C·M·D + N·C·iterations) time, O(N + C·D) memory (plain PyTorch: see its page)",
        source="Vyas et al. 2020, section 3.2",
    )

    def __post_init__(self) -> None:
        self._require(clusters=1, bits=1, iterations=0, seed=0)
        self._require_at_most(MOST_REPEATS, "iterations")
        check_bits(self.name, self.bits)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """Cluster the queries, attend with the centroids, broadcast."""
        if call.mask.ids:
            return per_segment(
                lambda q, k, v, mask: self.attend(q, k, v, call.under(mask)), query, key, value, call.mask
            )
        (N, M), mask = (query.shape[2], key.shape[2]), call.mask
        return clustered_attention(
            query,
            key,
            value,
            mask.query_padding(N),
            mask.key_padding(M),
            clusters=torch.sym_min(self.clusters, N),
            topk=0,
            bits=self.bits,
            iterations=self.iterations,
            scale=call.scale,
            seed=call.seed,
            dropout_p=call.dropout_p,
        )[0].to(query.dtype)
