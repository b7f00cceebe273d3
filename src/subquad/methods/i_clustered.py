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
Fewer visible keys than topk: those there are.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.masks import Mask
from subquad.methods.base import MOST_REPEATS, Call, Method, Partial, Traits, whole, wide
from subquad.methods.clustered import TOO_MANY_BITS, Clustered, cluster_queries, refusal
from subquad.ops.backends import choose
from subquad.ops.grouping import broadcast, group_mean, sort_into_blocks
from subquad.ops.hashing import MAX_BITS
from subquad.ops.heads import repeat_heads
from subquad.ops.native import clustered as compiled
from subquad.ops.padding import cleared_inputs
from subquad.ops.softmax import hide, visible_logsumexp, visible_softmax

BLOCK = 32  # slots a block: small enough to waste few, large enough for dense products


def improved_clustered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    *,
    labels: Int64[Tensor, "B H N"],
    clusters: int,
    topk: int,
) -> Partial:
    """Equations 9 to 17, in the dtype of the inputs, which is fp32 or fp64."""
    scale, dropout_p = call.scale, call.dropout_p
    visible = Mask(keys=(*call.mask.both, *call.mask.keys)).visible(query.shape[2], key.shape[2], query.device)
    centroids = group_mean(query, labels, clusters)
    centroid_logits = centroids @ key.transpose(-1, -2) * scale
    of_centroids = visible_softmax(centroid_logits, visible)

    # By logits, which order the keys as A^c does: weights that underflow to 0 would tie with those of hidden keys.
    top = hide(centroid_logits, visible).detach().topk(torch.sym_min(topk, key.shape[2]), dim=-1).indices
    mass = of_centroids.gather(-1, top).sum(-1, keepdim=True)
    rest = F.dropout(of_centroids.scatter(-1, top, 0.0), dropout_p) @ value

    blocks = sort_into_blocks(labels, clusters, BLOCK)
    top_keys, top_values = blocks.of_group(_rows(key, top)), blocks.of_group(_rows(value, top))
    logits = blocks.gather(query) @ top_keys.transpose(-1, -2) * scale
    seen = None if visible is None else blocks.of_group(_seen(visible, top)[..., None]).transpose(-1, -2)
    weights = F.dropout(visible_softmax(logits, seen), dropout_p)
    of_members = blocks.scatter(weights @ top_values)
    mass = broadcast(mass, labels)
    out = mass * of_members + broadcast(rest, labels)
    if not call.wants_lse:
        return out, None
    lse = blocks.scatter(visible_logsumexp(logits, seen)[..., None])
    return out, (lse - mass.masked_fill(mass == 0, 1.0).log())[..., 0]


def _rows(x: Float[Tensor, "B H M D"], top: Int64[Tensor, "B H C K"]) -> Float[Tensor, "B H C K D"]:
    picked = x.gather(2, top.flatten(2)[..., None].expand(-1, -1, -1, x.shape[3]))
    return picked.unflatten(2, top.shape[2:])


def _seen(visible: Tensor, top: Int64[Tensor, "B H C K"]) -> Tensor:
    return visible.expand(*top.shape[:3], -1).gather(-1, top)


@dataclass(frozen=True)
class ImprovedClustered(Method):
    """Improved clustered attention. Never further from exact attention than "clustered" is (proposition 2).

    Args:
        clusters: C, clusters of queries for each head. An item with no more queries is computed exactly.
        bits: length of the hash, 1 to 63.
        iterations: Lloyd iterations of k-means.
        topk: k, the keys of each cluster that its members attend to exactly; more than there are uses all: exact.
        seed: of the hash planes. The same seed gives "clustered" the same clusters.

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

    name: ClassVar[str] = "i-clustered"
    zeroes_padding: ClassVar[bool] = True  # they are in no cluster
    skips_padding: ClassVar[bool] = True
    traits: ClassVar[Traits] = replace(
        Clustered.traits,
        dropout="weights of the centroids on the other keys, one draw a cluster, and of each query on its top keys",
        exact_limit={"topk": "M"},
        example={"clusters": 5, "bits": 15, "iterations": 3, "topk": 4},
        complexity="O(C·M·D + N·(C·iterations + K·D)) time, O(N + C·(D + K)) memory (plain PyTorch: see its page)",
        source="Vyas et al. 2020, section 3.3",
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Cluster the queries, attend with the centroids, redo each cluster's top keys for its members."""
        clusters, topk = torch.sym_min(self.clusters, query.shape[2]), self.topk
        hashing = {"bits": self.bits, "iterations": self.iterations, "seed": call.seed}
        if choose(cpu=refusal(query, call)) == "cpu":
            sizes = {"clusters": clusters, "topk": topk, "scale": call.scale}
            return compiled.clustered_attention(query, key, value, call.mask, **sizes, **hashing), None
        query, key, value = cleared_inputs(query, key, value, call.mask)
        labels = cluster_queries(query, call.mask, clusters, **hashing)
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        query, key, value = wide(query, key, value)
        return improved_clustered_attention(query, key, value, call, labels=labels, clusters=clusters, topk=topk)
