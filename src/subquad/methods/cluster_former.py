"""Cluster-Former: near keys, and keys of similar tokens at any distance, in one softmax.

Wang, Zhou, Gan, Chen, Fang, Sun, Cheng, Liu 2020, "Cluster-Former: Clustering-based Sparse Transformer for Long-Range
Dependency Encoding", section 3, as one attention:

    near_i = {j: |i − j| ≤ window}
    far_i  = {j: j in i's chunk of the tokens sorted by (centroid, position)}
    out_i  = Σ_j m_ij e^{s_ij} v_j / Σ_j m_ij e^{s_ij},   s_ij = scale·q_i·k_j,   m_ij = [j ∈ near_i] + [j ∈ far_i]

==========  ==================================================
paper       here
==========  ==================================================
l           window
m           chunk
k           clusters
centroids   of each item and head, by k-means of sign hashes
==========  ==================================================

The two parts are merged by log-sum-exp, so a key that both reach counts twice (multiplicity).

Deviations from the paper, each on purpose. The paper has layers with windows and, between them, layers with chunks;
here each layer has both, so that it can take the place of attention. The paper clusters hidden states with centroids
that are kept from step to step; a method sees queries and keys only, so tokens are clustered by [q_i; k_i], each item
and head by itself, with the k-means under Hamming distance that "clustered" uses: no state and no training. Queries
and keys must be the same tokens. Causality concerns values only: clusters and chunks come from the whole sequence.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.selection.kmeans.op import hamming_kmeans
from subquad.kernels.selection.neighbours import neighbours
from subquad.kernels.selection.sorted_chunks import chunks_of
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.padding import zeroed_halves
from subquad.kernels.tokens.positions import ValidPositions
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask
from subquad.methods.core.bucketed import Bucketed
from subquad.methods.core.method import Call, Traits, whole

BITS, ITERATIONS = 63, 10  # of the k-means


def cluster_tokens(
    query: Float[Tensor, "B H N D"], key: Float[Tensor, "B H N D"], valid: Tensor, clusters: int, seed: int
) -> Int64[Tensor, "B H N"]:
    """Cluster the tokens by [q_i; k_i]: labels in [0, clusters), `clusters` for padding."""
    codes = hash_codes(torch.cat([query, key], dim=-1), BITS, seed, centre=True, valid=valid)
    return hamming_kmeans(codes, valid, clusters, BITS, ITERATIONS)


def sorted_chunks(labels: Int64[Tensor, "B H N"], mask: Mask, valid: Tensor, chunk: int) -> Buckets:
    """Chunks of the tokens sorted by (label, position), each of which meets itself."""
    N = labels.shape[2]
    slots = chunks_of(labels.argsort(dim=-1, stable=True), valid.sum(1), chunk)
    return Buckets(slots, slots).of_valid(mask.query_padding(N), mask.key_padding(N))


@dataclass(frozen=True)
class ClusterFormer(Bucketed):
    """Attention to a window and to chunks of the tokens sorted by cluster, in one softmax. Self-attention only.

    Args:
        window: tokens to each side that a query sees; with a causal mask, to the past.
        chunk: tokens of a chunk of the sorted order, which attend to each other.
        clusters: clusters of the tokens of each head. An item with no more tokens is sorted by position.
        seed: random seed of the directions of the hash.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 50, 16)
    >>> sq.attention(q, k, v, method=sq.ClusterFormer(window=4, chunk=8, clusters=5)).shape
    torch.Size([1, 2, 50, 16])
    """

    window: int = whole(32)
    chunk: int = whole(64, least=1, clamped=True)
    clusters: int = whole(32, least=1, clamped=True)
    seed: int = whole(0)

    name: ClassVar[str] = "cluster-former"
    traits: ClassVar[Traits] = Traits(
        family="buckets",
        causal="values-only",
        cross=False,
        dropout="attention weights in the window and in the chunk",
        multiplicity=2,
        stochastic=True,
        order_free=False,
        positional=True,
        exact_limit={"window": "N", "chunk": "N"},
        example={"window": 2, "chunk": 5, "clusters": 4},
        complexity="O(N·((W + m)·D + C)) time with a window of W and chunks of m",
        source="Wang et al. 2020 (arXiv:2009.06097)",
    )

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet: near ones, and those of the chunk."""
        with torch.no_grad():
            valid = ValidPositions.from_mask(call.mask, query, key).tokens(valid_as="either")
            queries, keys = zeroed_halves(query, repeat_heads(key, query.shape[1]), call.mask)
            labels = cluster_tokens(queries, keys, valid, self.clusters, call.seed)
            chunks = sorted_chunks(labels, call.mask, valid, self.chunk)
            return neighbours(query, key, self.window, call.mask), chunks
