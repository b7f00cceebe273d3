"""SMYRF: queries and keys are sorted along a random direction each; a chunk of queries attends to one of keys.

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

The paper rounds (F·a + b)/r to a bucket, and then makes its clusters equal by sorting; here sorting is all that is
done, and b and r have no effect. Several rounds are merged by log-sum-exp: a key counts as often as it meets the query.

Sizes are each item's own. n tokens that C does not divide make chunks of ⌊n/C⌋ and ⌈n/C⌉. Queries and keys that differ
in number make as many chunks each; where there are fewer keys than clusters, a key is in several of them, so that
no query is left without. Non-causal: ranks depend on the whole sequence, and a query may rank with later keys alone.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subquad.core.randomness import normal
from subquad.core.rounding import ceil_div
from subquad.core.versions import sym_max
from subquad.kernels.selection.sorted_chunks import even_chunks, even_shared_chunks, sort_valid
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.positions import ValidPositions
from subquad.kernels.tokens.slots import Buckets
from subquad.methods.core.bucketed import Bucketed
from subquad.methods.core.method import MOST_REPEATS, Call, Traits, upcast, whole
from subquad.methods.lsh import plane_scores


def asymmetric(query: Tensor, key: Tensor, line: ValidPositions) -> tuple[Tensor, Tensor]:
    """F(q) and G(k), equation 3, (B,H,N,D+2) and (B,H,M,D+2); real tokens alone count for M_Q and M_K."""
    query, key = upcast(query, repeat_heads(key, query.shape[1]))
    squares = [x.square().sum(-1) for x in (query, key)]
    longest = [
        (square if valid is None else square.masked_fill(~valid[:, None], 0.0)).amax(-1, keepdim=True)
        for square, valid in zip(squares, (line.valid_queries, line.valid_keys), strict=True)
    ]
    # Rounding, and padding, could make the differences negative.
    of_query, of_key = ((sum(longest) - square).clamp(min=0.0).sqrt()[..., None] for square in squares)
    f = torch.cat([query, torch.zeros_like(of_query), of_query], dim=-1)
    g = torch.cat([key, of_key, torch.zeros_like(of_key)], dim=-1)
    return f, g


@dataclass(frozen=True)
class Smyrf(Bucketed):
    """SMYRF: queries attend to keys in equal chunks of both, each sorted along a random direction.

    Args:
        clusters: C, chunks of queries and of keys in each round. 1 is exact attention.
        cluster_size: the most tokens of a chunk; their number then follows from each item's length. 0: `clusters`.
        rounds: how often queries and keys are sorted, each time along another direction.
        seed: random seed of the directions.

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
        """The traits; with clusters of constant size, time is linear in the length."""
        return replace(type(self).traits, subquadratic=self.cluster_size > 0)

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet: the clusters of all rounds."""
        with torch.no_grad():
            line = ValidPositions.from_mask(call.mask, query, key)
            f, g = asymmetric(query, key, line)
            lengths = line.query_lengths, line.key_lengths
            counts, most = torch.full_like(lengths[0], self.clusters), self.clusters
            if self.cluster_size:
                counts = ceil_div(lengths[0].maximum(lengths[1]), self.cluster_size).clamp(min=1)
                most = ceil_div(sym_max(line.N, line.M), self.cluster_size)
            sizes = [self.cluster_size or ceil_div(tokens, self.clusters) for tokens in (line.N, line.M)]
            queries, keys = [], []
            for direction in normal(call.seed, self.rounds, f.shape[3], like=f):
                ordered = sort_valid(f @ direction, line.valid_queries), sort_valid(g @ direction, line.valid_keys)
                queries.append(even_chunks(ordered[0], lengths[0], counts, most=most, size=sizes[0]))
                keys.append(even_shared_chunks(ordered[1], lengths[1], counts, most=most, size=sizes[1]))
            return (Buckets(torch.cat(queries, dim=2), torch.cat(keys, dim=2)),)

    @torch.no_grad()
    def scores(self, query: Tensor, key: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """For diagnostics: [x R; −R] of F(q) and G(k), the hash that Sun et al. examine (figure 1, down)."""
        line = ValidPositions.from_mask(call.mask, query, key)
        clusters = ceil_div(max(line.N, line.M), self.cluster_size) if self.cluster_size else self.clusters
        f, g = asymmetric(query, key, line)
        return plane_scores(f, clusters, call.seed), plane_scores(g, clusters, call.seed)
