"""Clustered attention with a tail: each cluster's top keys exactly, and the other keys as cells.

What "i-clustered" (Vyas et al. 2020) loses is three things, each with a cure that needs no training:

    S      = clusters of the queries by (q − mean q) L,  L Lᵀ = covariance of the keys   `kernels.selection.clusters`
             instead of by q: what must be alike within a cluster is q Kᵀ (their proposition 1)
    q̄_j    = Σ_{i in S_j} q_i / |S_j|                                                        their equation 3
    X      = cells of keys that are alike, with values that are alike                     `kernels.selection.cells`
    T_j    = the k keys with the largest q̄_j·k_l/√D + ln ‖k_l − mean of its cell‖ + (k_l − k̄)ᵀ W (k_l − k̄)/2D:
             weight that a cell would misplace, as the mean over the queries around q̄_j, whose covariance is W
    k̄, v̄   = one key and one value for the keys of cell x outside T_j, as q̄_j sees them       `kernels.attention.tail`
    out_i  = softmax over T_j with logits q_i·k_l/√D and over the cells with (q_i − q̄_j)·k̄_x/√D + ln Σ e^{q̄_j·k_l/√D}
             instead of one rest that all members share, and a mass on the top keys that is fixed for the cluster

With a window, keys near a query are exact for it in addition to T_j, in the same softmax. The cells lose the weights
with which they counted these keys: e^{q̄_j·k_l/√D + (q_i − q̄_j)·k̄_x/√D} for a key l of cell x.

==========  ==================
symbol      here
==========  ==================
C           clusters
k           topk
X           cells
==========  ==================

A query that is alone in its cluster has exact attention. Means and choices look at the whole
sequence; causal attention is by halves (`methods.core.halves`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from subquad.core.versions import sym_max, sym_min
from subquad.kernels.attention.sums.op import group_sums
from subquad.kernels.attention.tail.key_choice import covariance_of_moments
from subquad.kernels.attention.tail.op import attend_with_tail
from subquad.kernels.attention.tail.reference import cells_and_exact_pairs
from subquad.kernels.selection.cells.op import key_cells
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.selection.hashing.op import MAX_BITS
from subquad.kernels.selection.nearest.op import nearest_clusters
from subquad.kernels.tokens.positions import ValidPositions
from subquad.methods.clustered import TOO_MANY_BITS
from subquad.methods.core.halves import ByHalves, block_length, last_rows, queries_together
from subquad.methods.core.method import MOST_REPEATS, Call, Partial, Traits, whole
from subquad.methods.core.onnx import OnnxSupport
from subquad.methods.core.residual import Residual


class Growth(NamedTuple):
    """A number that follows a length n: √(factor·n), or √(n·√n/divisor) where that is more, rounded up."""

    factor: int
    divisor: int = 0  # 0: √(factor·n) at any length


class Factors(NamedTuple):
    """Growth of the settings that are 0: the clusters grow with the queries, the top keys with the keys."""

    clusters: Growth
    topk: Growth


OF_ITEM = Factors(clusters=Growth(2), topk=Growth(8))
# Twice the top keys: errors of a decoder's layers add up from token to token, and more keys are the cheapest way to
# smaller ones. From 1,024 tokens on, both grow with the power of ¾ (`benchmarks/growth_rule.py`).
OF_RECTANGLE = Factors(clusters=Growth(1, 32), topk=Growth(32, 1))


@dataclass(frozen=True)
class ClusteredTail(ByHalves):
    """Exact attention to the top keys of each cluster of queries, and to all other keys as a few centroids (cells).

    Args:
        clusters: C, clusters of queries for each head. An item with no more queries is computed exactly. 0: √(2n),
            rounded up, for an item of n queries; by halves as `OF_RECTANGLE` has it.
        topk: k, the keys of each cluster that its members attend to exactly. With `topk` ≥ number of keys the result is
            exact. 0: √(8m), rounded up, for an item of m keys.
        cells: X, centroids that represent the other keys; a query attends to k + X in all. With X = M: exact.
        window: keys at most `window` tokens from a query, to each side, are exact for it too; 0: none. In speech, where
            queries of one cluster attend to neighbours that differ, top keys of the cluster are not enough.
        bits: length of the hash from which k-means starts, 1 to 63.
        iterations: iterations of k-means on the hashes.
        refine: rounds of k-means on the vectors themselves, after that.
        seed: random seed of the hash planes.
        block: under a causal mask, tokens of a block on the diagonal, whose attention is exact. 0: 1,024, and 2,048 in
            dtypes of 16 bits.
        last: under a causal mask, queries at the end of each item that are exact.
        queries: under a causal mask, which queries are taken together: of a whole "rectangle", or of each "block"; or
            "earlier": clusters are made of the queries at the positions of a rectangle's keys. With last=0 too, it is
            strictly causal, and can be trained.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 2, 4, 300, 64)
    >>> sq.attention(q, k, v, method="clustered-tail").shape
    torch.Size([2, 4, 300, 64])
    """

    clusters: int = whole(0)
    topk: int = whole(0)
    cells: int = whole(32, least=1, clamped=True)
    window: int = whole(0)
    bits: int = whole(63, least=1, most=MAX_BITS, beyond=TOO_MANY_BITS)
    iterations: int = whole(1, most=MOST_REPEATS)
    refine: int = whole(2, most=MOST_REPEATS)
    seed: int = whole(0)
    block: int = block_length()
    last: int = last_rows()
    queries: str = queries_together("earlier")

    name: ClassVar[str] = "clustered-tail"
    onnx: ClassVar[OnnxSupport] = "without causal masks"
    following_length: ClassVar[tuple[str, ...]] = ("clusters", "topk")
    traits: ClassVar[Traits] = Traits(
        family="clusters",
        causal="values-only",
        by_halves=True,
        dropout="weights of each query on its top keys and on the cells",
        stochastic=True,
        order_free=False,
        positional=True,  # the cells' k-means starts from evenly spaced keys
        by_values=True,
        exact_limit={"topk": "M"},
        example={"clusters": 5, "topk": 4, "cells": 3, "bits": 15, "iterations": 3, "block": 4, "last": 3},
        complexity="O(C·M·D + N·(C·refine + K + X)·D) time, O(N + C·(K + X·D)) memory; "
        "C and K grow with √N by default, causal with N^¾",
        source="extends Vyas et al. 2020",
        zeroes_padding=True,  # padded queries are in no cluster
        skips_padding=True,
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call, factors: Factors = OF_ITEM) -> Partial:
        """Cluster the queries, sort the keys into cells, and attend to top keys and cells in one softmax."""
        tensors, sizes = self._of_tail(query, key, value, call, factors)
        sizes |= self._near(query, call)
        return attend_with_tail(*tensors, **sizes)

    def attend_in_rectangle(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attention in a rectangle of a causal call, in which defaults of clusters and top keys are other ones."""
        return self.attend(query, key, value, call, OF_RECTANGLE)

    def attend_by_earlier(self, query: Tensor, earlier: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Cluster the earlier queries, let each query join the nearest cluster, and attend as `attend` does."""
        M, line = key.shape[2], ValidPositions.from_mask(call.mask, query, key)
        lengths = None if line.valid_keys is None else line.key_lengths
        clusters, counts = by_length(self.clusters, OF_RECTANGLE.clusters, M, lengths)
        topk, wanted = by_length(self.topk, OF_RECTANGLE.topk, M, lengths)
        of_earlier = self._clusters(earlier, key, line.valid_keys, line.valid_keys, clusters, counts, call)
        sums, sizes = group_sums(earlier, of_earlier, clusters)
        means = sums / sizes.clamp(min=1)[..., None]
        with torch.no_grad():
            labels = nearest_clusters(query, key, means, sizes, line.valid_queries, line.valid_keys)
            around = covariance_of_moments(earlier, line.valid_keys, sums, means)
            cell = key_cells(key, value, line.valid_keys, cells=self.cells, seed=call.seed)
        options: dict[str, Any] = {"clusters": clusters, "topk": topk, "cells": self.cells, "wanted": wanted}
        options |= {"means": means, "around": around, "scale": call.scale, "dropout_p": call.dropout_p}
        options |= self._near(query, call)
        return attend_with_tail(query, key, value, labels, cell, None, **options)

    def residual(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Residual:
        """The cells by themselves, and the top keys of each cluster."""
        tensors, sizes = self._of_tail(query, key, value, call, OF_ITEM)
        of_cells, exact = cells_and_exact_pairs(*tensors, **sizes)
        return Residual(of_cells.partial, of_cells.of_query, of_cells.of_key, by_features=False, exact=(exact,))

    @property
    def keeps_residual(self) -> str | None:
        """The setting without near keys, as a remedy; None if there already are none."""
        return "window=0" if self.window else None

    def _near(self, query: Tensor, call: Call) -> dict[str, Any]:
        """The window, and the position of the first query of each item."""
        offset = call.mask.offset
        if not self.window or offset is None:
            return {"window": self.window}
        first = torch.zeros(len(query), dtype=torch.int64, device=query.device)
        return {"window": self.window, "start": first + torch.as_tensor(offset, device=query.device).reshape(-1)}

    def _of_tail(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, factors: Factors
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `attend_with_tail`: clusters of queries and cells of keys."""
        N, M, line = query.shape[2], key.shape[2], ValidPositions.from_mask(call.mask, query, key)
        queries = None if line.valid_queries is None else line.query_lengths
        clusters, counts = by_length(self.clusters, factors.clusters, N, queries)
        topk, wanted = by_length(self.topk, factors.topk, M, None if line.valid_keys is None else line.key_lengths)
        labels = self._clusters(query, key, line.valid_queries, line.valid_keys, clusters, counts, call)
        with torch.no_grad():
            cell = key_cells(key, value, line.valid_keys, cells=self.cells, seed=call.seed)
        sizes = {"clusters": clusters, "topk": topk, "cells": self.cells, "wanted": wanted}
        return (query, key, value, labels, cell, None), sizes | {"scale": call.scale, "dropout_p": call.dropout_p}

    def _clusters(
        self,
        query: Tensor,
        key: Tensor,
        valid_queries: Tensor | None,
        valid_keys: Tensor | None,
        clusters: int,
        counts: Tensor | None,
        call: Call,
    ) -> Tensor:
        """The clusters of queries that attend alike to these keys."""
        sizes = {"clusters": clusters, "bits": self.bits, "iterations": self.iterations, "refine": self.refine}
        with torch.no_grad():
            return query_clusters(
                query, key, valid_queries, valid_keys, space="logits", counts=counts, seed=call.seed, **sizes
            )


def by_length(setting: int, growth: Growth, tokens: int, lengths: Tensor | None) -> tuple[int, Tensor | None]:
    """Replace a setting of 0 by what the growth has at a length: the largest one, and for padded items one per item.

    Any other setting is what it is, at most one for each token.
    """
    factor, divisor = growth
    if setting > 0:
        return sym_min(setting, tokens), None
    if lengths is None:
        size = root(factor * tokens)
        size = sym_max(size, three_quarters(tokens, divisor)) if divisor else size
        return sym_min(size, tokens), None
    most = torch.sym_int(torch.sym_sqrt(factor * tokens)) + 1
    sizes = (factor * lengths).double().sqrt().ceil().long()
    if divisor:
        most = sym_max(most, three_quarters(tokens, divisor))
        lengths = lengths.double()
        sizes = torch.maximum(sizes, ((lengths * lengths.sqrt() / divisor).sqrt() - ROUNDING).long() + 1)
    return sym_min(most, tokens), sizes.clamp(min=1)


def root(n: int) -> int:
    """√n, rounded up; n may be symbolic, as Dynamo's lengths are, which `math.isqrt` does not take."""
    return torch.sym_int(torch.sym_sqrt(n - 1)) + 1


ROUNDING = 2.0**-20  # of whole numbers in fp64


def three_quarters(n: int, divisor: int) -> int:
    """√(n·√n/divisor), rounded up; n may be symbolic, too."""
    return torch.sym_int(torch.sym_sqrt(n * torch.sym_sqrt(n) / divisor) - ROUNDING) + 1
