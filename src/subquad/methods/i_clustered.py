"""Improved clustered attention: clustered attention, with each cluster's top-k keys done exactly for each member.

Vyas, Katharopoulos, Fleuret 2020, "Fast Transformers with Clustered Attention", section 3.3:

    T_jl  = 1 where key l is among the k keys with the largest A^c_jl
    m̂_j   = Σ_l T_jl A^c_jl                                                              equation 9
    A^t_il = m̂_j · softmax_{l: T_jl = 1}(Q_i·K_l / √D)   where T_jl = 1                  equation 10
           = A^c_jl                                       elsewhere
    V̂_i   = Σ_l A^t_il V_l                                                               equations 11 to 17

==========  ==================
paper       here
==========  ==================
k           topk
A^c         of_centroids
m̂           mass
T           top (the indices)
==========  ==================

The log-sum-exp of query i follows: that of its own logits with its top keys, less ln m̂_j.

Queries are sorted by cluster into dense blocks, so that each block reads its cluster's keys once and all products are
dense. Deviations from the published code, each on purpose: those of "clustered", and the gradient flows through m̂.
If fewer than `topk` keys are visible, all are used.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from subquad.kernels.selection.hashing.op import MAX_BITS
from subquad.methods.clustered import SPACES, TOO_MANY_BITS, Clustered, ClustersQueries
from subquad.methods.core.halves import block_length, last_rows, queries_together
from subquad.methods.core.method import MOST_REPEATS, Traits, choice, whole
from subquad.methods.core.onnx import OnnxSupport


@dataclass(frozen=True)
class ImprovedClustered(ClustersQueries):
    """Improved clustered attention. Never further from exact attention than "clustered" is (proposition 2).

    Args:
        clusters: C, clusters of queries for each head. An item with no more queries is computed exactly.
        bits: length of the hash, 1 to 63.
        iterations: Lloyd iterations of k-means.
        topk: k, the keys of each cluster that its members attend to exactly. With `topk` ≥ number of keys the result is
            exact.
        seed: random seed of the hash planes. The same seed gives "clustered" the same clusters.
        space: what is clustered: "queries", the paper's, or "logits", so that queries with alike q·Kᵀ are together.
        refine: rounds of k-means on the vectors themselves, after that on their hashes.
        block: under a causal mask, tokens of a block on the diagonal, whose attention is exact. 0: 1,024, and 2,048 in
            dtypes of 16 bits.
        last: under a causal mask, queries at the end of each item that are exact.
        queries: under a causal mask, which queries are taken together: of a whole "rectangle", or of each "block".

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 2, 4, 300, 64)
    >>> sq.attention(q, k, v, method="i-clustered").shape
    torch.Size([2, 4, 300, 64])
    """

    clusters: int = whole(100, least=1)
    bits: int = whole(63, least=1, most=MAX_BITS, beyond=TOO_MANY_BITS)
    iterations: int = whole(10, most=MOST_REPEATS)
    topk: int = whole(32, least=1)
    seed: int = whole(0)
    space: str = choice(*SPACES)
    refine: int = whole(0, most=MOST_REPEATS)
    block: int = block_length()
    last: int = last_rows()
    queries: str = queries_together()

    name: ClassVar[str] = "i-clustered"
    onnx: ClassVar[OnnxSupport] = "without causal masks"
    traits: ClassVar[Traits] = replace(
        Clustered.traits,
        dropout="weights of the centroids on the other keys, one draw a cluster, and of each query on its top keys",
        exact_limit={"topk": "M"},
        example={"clusters": 5, "bits": 15, "iterations": 3, "topk": 4, "block": 4, "last": 3},
        complexity="O(C·M·D + N·(C·iterations + K·D)) time, O(N + C·(D + K)) memory (plain PyTorch: see its page)",
        source="Vyas et al. 2020, section 3.3",
    )

    def top_keys(self) -> int:
        """The number of its cluster's keys that each query attends to individually."""
        return self.topk
