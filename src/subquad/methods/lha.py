"""Learning-to-hash attention (LHA): attention inside buckets that learned hash functions fill.

Sun, Yang, Yoo 2022, "Sparse Attention with Learning-to-Hash", sections 3 and 4:

    S_Q, S_K = softmax_b(H_Q(q_i)), softmax_b(H_K(k_j))                                   section 4.4
    bucket b = the √2·N/B queries with the largest S_Q·b, and as many keys by S_K·b       section 4.4, algorithm 1
    out_i    = attention of query i to the keys of its buckets                            equation 7
    causal:  S_Q = S_K = softmax_b(H_Q(q_i) + H_K(k_i))                                   equation 18
    ψ_b(i)   = Σ_{j in b} A_ij,   ψ'_b(j) ∝ Σ_{i in b} A_ij                               equations 11, 14
    loss     = KL(ψ ‖ S_Q) + KL(ψ' ‖ S_K), means over tokens and heads                    equations 13, 19

==========  ==================
paper       here
==========  ==================
B           buckets
N/B         bucket_size
√2          enlarge
H_Q, H_K    HashFunctions
ψ, ψ'       utility_targets
==========  ==================

What the paper leaves open. A query in several buckets is merged by log-sum-exp, which counts a key as often as the two
share a bucket ("multiplicity"), or once ("union"). A query in no bucket attends in the bucket that it scores highest
itself; under a causal mask also to itself. The hash functions read q·√scale and k·√scale.

Deviations from the paper, each on purpose. Membership in ψ is balanced by default, as the buckets are: with the paper's
argmax the loss falls by sending everything to one bucket. ψ is renormalised over the buckets. Under
a causal mask the exact ψ is that of causal attention.

Deviations from the published code: no layer norm on queries and keys, separate hashes for them, padding is not a key.
Causality of the balanced buckets concerns values only: the top of a whole sequence is taken. `selection=argmax` puts
each token in the one bucket that it scores highest, of any size, and is strictly causal.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.kernels.attention.attention_sums import approximate_attention_sums, attention_sums
from subquad.kernels.selection.balanced import enlarged
from subquad.kernels.selection.hash_functions import KINDS, Hashed, divergence
from subquad.kernels.selection.top.op import top_and_best
from subquad.kernels.tensors import one_hot
from subquad.kernels.tokens.padding import zeroed_halves
from subquad.kernels.tokens.positions import valid_lengths
from subquad.kernels.tokens.slots import members
from subquad.methods.core.bucketed import HashedBuckets, LearnsHashes
from subquad.methods.core.method import WIDEST, Call, Fit, Traits, choice, number, whole


def membership(scores: Float[Tensor, "B H N C"], valid: Tensor | None, balanced: bool) -> Float[Tensor, "B H N C"]:
    """A mask of bucket members: the N/B tokens that score highest in it, or each token in its best bucket."""
    B, _, N, C = scores.shape
    if balanced:
        sizes = enlarged(valid_lengths(valid, B, N, scores.device), C, 1.0)
        inside = members(top_and_best(scores, sizes, math.ceil(N / C), valid, odds=True)[0], N)
    else:
        inside = one_hot(scores.argmax(-1), C)
        inside = inside if valid is None else inside * valid[:, None, :, None]
    return inside.to(scores.dtype)


@dataclass(frozen=True)
class LearnedHash(LearnsHashes, HashedBuckets):
    """Attention inside the buckets of learned hash functions. Only as a bound method.

    Args:
        buckets: B. 0: as many as `bucket_size` asks for at the longest length that the layer is bound for.
        bucket_size: queries, and keys, of a bucket before `enlarge`. 0: N/B.
        hash: "mlp" or "linear".
        hidden: width of the perceptron's hidden layer.
        enlarge: factor on the bucket size; 1 for buckets of N/B.
        merge: how often a key counts that shares several buckets with a query: "multiplicity" or once, "union".
        selection: "balanced" buckets of one size, or each token in its "argmax" bucket: strictly causal.
        membership: buckets in the loss's ψ: "balanced" or, as in the paper, "argmax".
        targets: ψ in the loss from "exact" attention, O(N²) time, or from random "features", O(N).
        features: how many random features.
        seed: random seed of the start of the hash functions, and of the random features.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(64, 4, method=sq.LearnedHash(buckets=4))
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    buckets: int = whole(8, most=WIDEST, counts=True)
    bucket_size: int = whole(0)
    hash: str = choice(*KINDS)
    hidden: int = whole(64, least=1, most=WIDEST)
    enlarge: float = number(math.sqrt(2), least=1.0)
    merge: str = choice("multiplicity", "union")
    selection: str = choice("balanced", "argmax")
    membership: str = choice("balanced", "argmax")
    targets: str = choice("exact", "features")
    features: int = whole(256, least=1, most=WIDEST)
    seed: int = whole(0)

    name: ClassVar[str] = "lha"
    traits: ClassVar[Traits] = replace(
        HashedBuckets.shared_traits, learned=True, fit=Fit(metric="utility"), example={"buckets": 4, "hidden": 8}
    )

    def hashes(self, query: Tensor, key: Tensor, call: Call) -> tuple[Hashed, Hashed]:
        """The logits of S_Q and S_K; under a causal mask, and for argmax buckets, one score for both (equation 18)."""
        if not self.ties(call):
            return super().hashes(query, key, call)
        of_query, of_key = super().hashes(*zeroed_halves(query, key, call.mask), call)
        return (of_query + of_key,) * 2

    def auxiliary_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """KL(ψ ‖ S_Q) + KL(ψ' ‖ S_K): equations 13 and 19."""
        of_query, of_key = self.scores(query, key, call)
        psi_query, psi_key = self.utilities(query, key, of_query, of_key, call)
        return divergence(psi_query, of_query) + divergence(psi_key, of_key)

    @torch.no_grad()
    def utilities(
        self, query: Tensor, key: Tensor, of_query: Tensor, of_key: Tensor, call: Call
    ) -> tuple[Float[Tensor, "B H N C"], Float[Tensor, "B H M C"]]:
        """ψ and ψ', not yet normalised over the buckets."""
        mask, balanced = call.mask, self.membership == "balanced"
        in_query = membership(of_query, mask.query_padding(query.shape[2]), balanced)
        in_key = membership(of_key, mask.key_padding(key.shape[2]), balanced)
        if self.targets == "exact":
            return attention_sums(query, key, mask, call.scale, in_key, in_query)
        drawn = {"features": self.features, "seed": call.seed}
        return approximate_attention_sums(query, key, mask, call.scale, in_key, in_query, **drawn)
