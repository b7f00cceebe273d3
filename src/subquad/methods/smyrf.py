"""SMYRF: queries and keys are sorted along a random direction each, and equal chunks of the two meet.

Daras, Kitaev, Odena, Dimakis 2020, "SMYRF: Efficient Attention using Asymmetric Clustering"; equations as numbered in
Sun, Yang, Yoo 2022:

    F(q) = [q; 0; √(M_Q² + M_K² − ‖q‖²)],  G(k) = [k; √(M_Q² + M_K² − ‖k‖²); 0]              equation 3
    ‖F(q) − G(k)‖² = 2(M_Q² + M_K²) − 2 q·k:  the nearest key is the one with the largest product
    u_i = F(q_i)·a,  w_j = G(k_j)·a,  a a random direction                                    equation 10
    cluster c = the c-th of C equal chunks of the queries sorted by u, and of the keys sorted by w
    out_i     = attention of query i to the keys of its cluster

==========  ==========================================
paper       here
==========  ==========================================
M_Q, M_K    the longest query and key of an item and head
C           clusters, or N / cluster_size
a           one direction a round, the same for all heads
==========  ==========================================

Where the paper rounds (F·a + b)/r to a bucket, its clusters are then made equal by sorting; here sorting is all that is
done, and b and r have no effect. Several rounds are merged by log-sum-exp: a key counts as often as it meets the query.

Sizes are each item's own. n tokens that C does not divide make chunks of ⌊n/C⌋ and ⌈n/C⌉. Queries and keys that differ
in number make as many chunks each; where there are fewer keys than clusters, a key is in several of them, so that
no query is left without. Non-causal: ranks depend on the whole sequence, and a query may rank with later keys alone.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.methods.base import MOST_REPEATS, Call, Method, Partial, Traits, whole, wide
from subquad.methods.lsh import plane_scores
from subquad.ops.choose.chunks import even_chunks, even_shared_chunks, sort_real
from subquad.ops.heads import repeat_heads
from subquad.ops.parts.pairs.op import attend_pairs
from subquad.ops.slots import Buckets
from subquad.ops.timeline import real_lengths
from subquad.randomness import normal


def asymmetric(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H M D"],
    real_queries: Bool[Tensor, "B N"] | None,
    real_keys: Bool[Tensor, "B M"] | None,
) -> tuple[Float[Tensor, "B H N D+2"], Float[Tensor, "B H M D+2"]]:
    """F(q) and G(k), equation 3. The longest real query and key of each item and head set M_Q and M_K."""
    squares = [x.square().sum(-1) for x in (query, key)]
    longest = [
        (square if real is None else square.masked_fill(~real[:, None], 0.0)).amax(-1, keepdim=True)
        for square, real in zip(squares, (real_queries, real_keys), strict=True)
    ]
    # Rounding, and padding, could make the differences negative.
    of_query, of_key = ((sum(longest) - square).clamp(min=0.0).sqrt()[..., None] for square in squares)
    f = torch.cat([query, torch.zeros_like(of_query), of_query], dim=-1)
    g = torch.cat([key, of_key, torch.zeros_like(of_key)], dim=-1)
    return f, g


@dataclass(frozen=True)
class Smyrf(Method):
    """SMYRF: equal chunks of the queries and of the keys, each sorted along a random direction, meet.

    Args:
        clusters: C, chunks of queries and of keys in each round. 1 is exact attention.
        cluster_size: the most tokens of a chunk; their number then follows from each item's length. 0: `clusters`.
        rounds: how often it is sorted along another direction.
        seed: of the directions.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 50, 16)
    >>> sq.attention(q, k, v, method=sq.Smyrf(clusters=4, rounds=2)).shape
    torch.Size([1, 2, 50, 16])
    """

    clusters: int = whole(8, least=1, counts=True)
    cluster_size: int = whole(0, clamped=True)
    rounds: int = whole(2, least=1, most=MOST_REPEATS)
    seed: int = whole(0)

    name: ClassVar[str] = "smyrf"
    traits: ClassVar[Traits] = Traits(
        family="buckets",
        dropout="attention weights in each cluster",
        multiplicity="rounds",
        stochastic=True,
        subquadratic=False,
        exact_limit={"clusters": 1, "cluster_size": 0},
        example={"clusters": 4},
        complexity="O(rounds·N·M/C·D) time with C clusters, O(rounds·N·S·D) with a cluster size of S",
        source="Daras et al. 2020",
    )

    def describe(self) -> Traits:
        """Clusters of one size cost time linear in the length."""
        return replace(type(self).traits, subquadratic=self.cluster_size > 0)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Sort, cut, attend inside the chunks, merge."""
        wide_query, wide_key = wide(query, key)
        buckets = self.meetings(wide_query, wide_key, call)
        return attend_pairs(query, key, value, buckets, call.mask, scale=call.scale, dropout_p=call.dropout_p)

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Which queries meet which keys: the clusters of all rounds."""
        with torch.no_grad():
            B, H, N, D = query.shape
            M = key.shape[2]
            real_queries, real_keys = call.mask.query_padding(N), call.mask.key_padding(M)
            f, g = asymmetric(query, repeat_heads(key, H), real_queries, real_keys)
            directions = normal(call.seed, self.rounds, D + 2, like=query)
            lengths = real_lengths(real_queries, B, N, query.device), real_lengths(real_keys, B, M, query.device)
            counts, most = self._clusters_of(*lengths, torch.sym_max(N, M))
            queries, keys = [], []
            for direction in directions:
                of_queries, of_keys = sort_real(f @ direction, real_queries), sort_real(g @ direction, real_keys)
                queries.append(even_chunks(of_queries, lengths[0], counts, most=most, size=self._size(N)))
                keys.append(even_shared_chunks(of_keys, lengths[1], counts, most=most, size=self._size(M)))
            return (Buckets(torch.cat(queries, dim=2), torch.cat(keys, dim=2)),)

    @torch.no_grad()
    def scores(
        self, query: Tensor, key: Tensor, call: Call
    ) -> tuple[Float[Tensor, "B H N C"], Float[Tensor, "B H M C"]]:
        """[x R; −R] of F(q) and G(k): the hash that Sun et al. examine (figure 1, down).

        For diagnostics: `attend` sorts along one direction instead, which makes chunks equal.
        """
        N, M = query.shape[2], key.shape[2]
        f, g = asymmetric(
            query, repeat_heads(key, query.shape[1]), call.mask.query_padding(N), call.mask.key_padding(M)
        )
        clusters = self.clusters if self.cluster_size == 0 else -(-max(N, M) // self.cluster_size)
        return plane_scores(f, clusters, call.seed), plane_scores(g, clusters, call.seed)

    def _clusters_of(self, queries: Tensor, keys: Tensor, longest: int) -> tuple[Int64[Tensor, "B"], int]:
        """The number of clusters of each item, and the most that there can be."""
        if self.cluster_size == 0:
            return torch.full_like(queries, self.clusters), self.clusters
        counts = -(-queries.maximum(keys) // self.cluster_size)
        return counts.clamp(min=1), -(-longest // self.cluster_size)

    def _size(self, tokens: int) -> int:
        return -(-tokens // self.clusters) if self.cluster_size == 0 else self.cluster_size
