"""Routing attention: each centroid of the queries gathers its nearest tokens, which attend to each other.

Roy, Saffar, Vaswani, Grangier 2021, "Efficient Content-Based Sparse Attention with Routing Transformers", section 4.1
and algorithm 1:

    k_j   = q_j                                                     shared queries and keys
    cluster c = the w tokens with the largest x̂·μ_c, x̂ = q/‖q‖
    out_i = attention of query i to the keys of its clusters
    μ_c  ← λ μ_c + (1 − λ) of the tokens nearest to μ_c             in training, λ = 0.999

==========  ==========================
paper       here
==========  ==========================
k           clusters
w           `cluster_size`, or n / clusters
μ           Centroids
λ           DECAY
==========  ==========================

The paper shares queries and keys in its causal form; here they are shared in both, so one selection serves queries and
keys. The keys that are passed in are checked and then not read. Centroids are compared by direction, and both their
targets and they themselves are brought back to length 1 (spherical k-means). Only their choice is made with normalised
vectors: the logits are those of the queries as they are.

What the paper leaves open. A query in several clusters is merged by log-sum-exp: a key counts as often as the two share
a cluster. A query that no centroid takes attends to the keys of its nearest one; under a causal mask also to itself.

The centroids are state of the bound layer, not parameters: they move once in each forward pass in training, after they
were used, by the tokens that are real as queries and as keys. In evaluation they are constant. A forward pass that is
computed again, by activation checkpointing, moves them again. If torch.distributed is initialised, each process is
taken to have a part of the batch: they move by the tokens of all parts, so that they are equal everywhere. Causality
concerns values only: w tokens of the whole sequence are taken.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from subquad.kernels.selection.balanced import balanced_buckets
from subquad.kernels.selection.spherical import Centroids
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.positions import ValidPositions
from subquad.kernels.tokens.slots import Buckets
from subquad.methods.core.bucketed import Bucketed, attend_inside
from subquad.methods.core.method import WIDEST, Call, Partial, Traits, upcast, whole


@dataclass(frozen=True)
class Routing(Bucketed):
    """Attention inside clusters of the queries, whose centroids follow the training. Only as a bound method.

    Args:
        clusters: centroids of each head.
        cluster_size: w, tokens of a cluster. 0: each item's n/clusters.
        seed: random seed of the centroids' start.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(64, 4, method=sq.Routing(clusters=4))
    >>> layer(torch.randn(2, 100, 64), is_causal=True).shape
    torch.Size([2, 100, 64])
    """

    clusters: int = whole(8, least=1, most=WIDEST, counts=True)
    cluster_size: int = whole(0)
    seed: int = whole(0)

    name: ClassVar[str] = "routing"
    traits: ClassVar[Traits] = Traits(
        family="buckets",
        causal="values-only",
        cross=False,
        dropout="attention weights in each cluster",
        subquadratic=False,
        learned=True,
        exact_limit="the queries replace the keys: it equals exact attention only where they are equal",
        example={"clusters": 4},
        complexity="O(N·(C + N/C)·D) time with C clusters, O(N·(C + W)·D) with a cluster size of W",
        source="Roy et al. 2021, section 4.1",
    )

    def describe(self) -> Traits:
        """The traits; with clusters of constant size, time is linear in the length."""
        return replace(type(self).traits, subquadratic=self.cluster_size > 0)

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module:
        """The initial centroids."""
        return Centroids(heads, head_dim, self.clusters, self.seed)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Gather, attend inside the clusters, merge; in training the centroids then follow the queries."""
        buckets, value = self.meetings(query, key, call), repeat_heads(value, query.shape[1])
        self.follow(query, key, call)
        return attend_inside(query, query, value, buckets, call)

    def follow(self, query: Tensor, key: Tensor, call: Call) -> None:
        """In training, move the centroids towards their queries."""
        if call.learned.training:
            call.learned.follow(
                upcast(query.detach())[0], ValidPositions.from_mask(call.mask, query, key).tokens(valid_as="both")
            )

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet."""
        with torch.no_grad():
            scores = call.learned(*upcast(query))
            return balanced_buckets(scores, scores, call.mask, enlarge=1.0, size=self.cluster_size, odds=False)
