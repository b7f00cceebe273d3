"""Learning-to-hash attention with a tail: a bucket's keys exactly, all other keys as a few centroids.

An extension of Sun et al. 2022 (see "lha"): what their buckets miss is the mass of the keys that are not chosen.

    β(i)   = argmax_b H_Q(q_i)_b                          every query is in exactly one bucket
    K_b    = the `keys` keys with the largest H_K(k_j)_b   raw logits; the buckets of keys overlap
    k̄, v̄   = one key and one value for those keys of a cell that are not in K_b, as the bucket's mean query sees them
             (`kernels.attention.tail` has the formula; with a mean query of 0 they would be plain means, and their
             bias ln n)
    out_i  = softmax over K_β(i) with logits q·k/√D, and over the cells with logits q·k̄/√D + bias

    L_Q    = KL(t ‖ softmax_b H_Q(q_i)),  t_b = softmax_b(4 ln Σ_{j in K_b} A_ij)
    L_K    = Σ_b KL(p_b ‖ softmax_j H_K(k_j)_b),  p_b(j) ∝ Σ_i r_ib A_ij,
             r_ib = [b = β(i)] + ¼·[i is among the eight queries that score highest in b]

The ¼ feeds buckets that no query is in. L_K's softmax runs over the keys, so that H_K ranks keys within a bucket. The
targets t and p are constants; q and k are detached. Cells partition the keys: k-means of their sign hashes.

The hash functions read q·√scale and k·√scale. Cells hold later keys: causal attention is by halves
(`methods.core.halves`).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.kernels.attention.attention_sums import attention_sums
from subquad.kernels.attention.softmax import hide
from subquad.kernels.selection.balanced import best_bucket
from subquad.kernels.selection.hash_functions import KINDS, divergence
from subquad.kernels.tensors import one_hot
from subquad.kernels.tokens.positions import ValidPositions
from subquad.kernels.tokens.slots import Buckets, members
from subquad.methods.core.bucketed import LearnsHashes, attend_with_cells, residual_in_cells
from subquad.methods.core.exact import exact
from subquad.methods.core.halves import ByHalves, block_length, last_rows, queries_together
from subquad.methods.core.method import WIDEST, Call, Fit, Partial, Traits, choice, whole
from subquad.methods.core.residual import Residual

SHARPNESS = 4.0  # of the target of the queries
FEEDING = 0.25  # weight in p_b of the queries that score highest in b
FED = 8  # how many they are


@dataclass(frozen=True)
class LearnedHashTail(ByHalves, LearnsHashes):
    """Exact attention to the keys of a learned bucket, and to centroids of all others. Only as a bound method.

    Args:
        buckets: B. Every query is in exactly one.
        keys: exact keys of each bucket. If there are fewer keys, all are used, and the result is exact.
        cells: centroids that represent the keys outside of a bucket; a query attends to keys + cells in total.
        hash: "mlp" or "linear".
        hidden: width of the perceptron's hidden layer.
        seed: random seed of the start of the hash functions, and of the cells' hash planes.
        block: under a causal mask, tokens of a block on the diagonal, whose attention is exact. 0: 1,024, and 2,048 in
            dtypes of 16 bits.
        last: under a causal mask, queries at the end of each item that are exact.
        queries: under a causal mask, which queries are taken together: of a whole "rectangle", or of each "block".

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(64, 4, method=sq.LearnedHashTail(buckets=4, keys=16, cells=4))
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    buckets: int = whole(32, least=1, most=WIDEST, counts=True)
    keys: int = whole(96, least=1)
    cells: int = whole(32, least=1, counts=True)
    hash: str = choice(*KINDS)
    hidden: int = whole(64, least=1, most=WIDEST)
    seed: int = whole(0)
    block: int = block_length()
    last: int = last_rows()
    queries: str = queries_together()

    name: ClassVar[str] = "lha-tail"
    traits: ClassVar[Traits] = Traits(
        family="buckets",
        causal="values-only",
        by_halves=True,
        dropout="attention weights of a bucket's keys and of the centroids",
        stochastic=True,
        positional=True,  # the cells' k-means starts from evenly spaced keys
        learned=True,
        fit=Fit(metric="error"),
        exact_limit={"keys": "M"},
        example={"buckets": 4, "keys": 6, "cells": 3, "hidden": 8, "block": 4, "last": 3},
        complexity="O(N·(B + K + X)·D + M·B·D) time for K keys and X cells, O((N + M)·B + B·(K + X·D)) memory",
        source="extends Sun et al. 2022",
        skips_padding=True,
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Hash, attend to the keys of each query's bucket and to the centroids of the others."""
        if not torch.compiler.is_exporting() and key.shape[2] <= self.keys:  # every bucket has all keys
            return exact(query, key, value, call)
        (buckets,) = self.meetings(query, key, call)
        return attend_with_cells(query, key, value, buckets, self.cells, call)

    @property
    def summarises(self) -> bool:
        """True if the keys outside a query's bucket take part, as centroids."""
        return True

    def residual(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Residual:
        """The centroids by themselves, and the keys of each query's bucket."""
        (buckets,) = self.meetings(query, key, call)
        return residual_in_cells(query, key, value, buckets, self.cells, call)

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet exactly."""
        with torch.no_grad():
            of_query, of_key = self.hashes(query, key, call)
            sizes = ValidPositions.from_mask(call.mask, query, key).key_lengths.clamp(max=self.keys)
            return (best_bucket(of_query, of_key, call.mask, sizes, self.keys),)

    def auxiliary_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """L_Q, a mean over queries and heads, and L_K, a mean over items and heads."""
        of_query, of_key = self.scores(query, key, call)
        line = ValidPositions.from_mask(call.mask, query, key)
        queries, keys = (None if x is None else x[:, None, :, None] for x in (line.valid_queries, line.valid_keys))
        with torch.no_grad():
            (buckets,) = self.meetings(query, key, call)
            inside = members(buckets.keys, line.M).to(query.dtype)
            mass, received = attention_sums(query, key, call.mask, call.scale, inside, feeding(of_query, queries))
            target = (SHARPNESS * mass.clamp(min=torch.finfo(query.dtype).tiny).log()).softmax(-1)
            target = target if queries is None else target * queries
        return divergence(target, of_query) + self.buckets * divergence(received.mT, hide(of_key, keys).mT)


def feeding(of_query: Float[Tensor, "B H N C"], visible: Tensor | None) -> Float[Tensor, "B H N C"]:
    """r: the queries whose attention each bucket's keys should cover."""
    best = one_hot(of_query.argmax(-1), of_query.shape[-1]).to(of_query.dtype)
    # Stable, so that among equal scores, as of queries that no hidden unit sees, padding decides nothing.
    top = hide(of_query, visible).sort(dim=2, descending=True, stable=True).indices[:, :, :FED]
    fed = best.scatter_add(2, top, torch.full_like(best, FEEDING)[:, :, : top.shape[2]])
    return fed if visible is None else fed * visible
