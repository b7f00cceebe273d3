"""Common parts of the kernels of members: clusters with their lists and cells, and how a program reads these."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.group_blocks import GroupBlocks, group_blocks
from subquad.kernels.triton.launch import inner_of, load_positions, load_rows, padded, strides


@dataclass(frozen=True)
class Clustering:
    """Queries by cluster with what a cluster has: lists of keys, and cells or the mass of the list and the rest.

    Attributes:
        order: (B,H,N) int32, queries by cluster.
        offsets: (B,H,C+1) int32.
        centroids: (B,H,C,D) fp32.
        top: (B,H,C,K) int32, M where a slot is empty.
        cells: (k̄, v̄, λ), or None.
        mass: (B,H,C) of the list, or None.
        remaining: (B,H,C,E), or None.
    """

    order: Tensor
    offsets: Tensor
    centroids: Tensor
    top: Tensor
    cells: tuple[Tensor, Tensor, Tensor] | None = None
    mass: Tensor | None = None
    remaining: Tensor | None = None

    def blocks(self, size: int, remaining: bool = False) -> GroupBlocks:
        """Blocks of queries of one cluster, and with `remaining` of those in none."""
        return group_blocks(self.offsets, self.order.shape[2], size, remaining)

    def arguments(self) -> dict[str, object]:
        """The arguments of all kernels."""
        cell_keys, cell_values, cell_lse = self.cells or (None, None, None)
        return {
            "order": self.order,
            "top": self.top,
            "centroids": self.centroids,
            "cell_keys": cell_keys,
            "cell_values": cell_values,
            "cell_lse": cell_lse,
            "mass": self.mass,
            "C": self.centroids.shape[2],
            "K": self.top.shape[3],
            "X": 0 if cell_lse is None else cell_lse.shape[3],
            "CELLS": 16,  # of a step: few clusters have more
        }


def sizes(query: Tensor, key: Tensor, value: Tensor, scale: float) -> dict[str, object]:
    """The inputs and their sizes as arguments of a kernel."""
    (_, H, N, D), (_, G, M, E) = query.shape, value.shape
    return {
        **{"query": query, "key": key, "value": value, "scale": scale},
        **strides("query", query),
        **strides("key", key),
        **strides("value", value),
        **{"H": H, "G": G, "N": N, "M": M, "D": D, "E": E, "WIDTH": padded(D), "VALUES": padded(E)},
    }


@triton.jit
def load_block(order, group, start, stop, blocks, head, N, QUERIES: tl.constexpr):
    """(the cluster of the program's block, its queries, and which of them there are)."""
    block = head * blocks + tl.program_id(0)
    position = tl.load(start + block) + tl.arange(0, QUERIES)
    token, member = load_positions(order + head * N, position, tl.load(stop + block))
    return tl.load(group + block), token, member


@triton.jit
def load_listed(top, of_cluster, slot, K, M):
    """The keys of these slots, and whether they are keys at all."""
    token = tl.load(top + of_cluster * K + slot, mask=slot < K, other=-1)
    present = (token >= 0) & (token < M)
    return tl.where(present, token, 0), present


@triton.jit
def cell_logits(
    q,
    query,
    query_n,
    token,
    member,
    mean,
    cell_keys,
    cell_lse,
    of_cluster,
    x,
    X,
    D,
    scale,
    WIDTH: tl.constexpr,
    SLICE: tl.constexpr,
):
    """(k̄ as queries meet it, scale·(q − q̄)·k̄ + λ): −∞ for a cell that is not there."""
    cell_keys += of_cluster * X * D
    k = load_rows(cell_keys, D, x, x < X, D, WIDTH).to(q.dtype)
    products = tl.sum(k.to(tl.float32) * mean[None, :], 1)
    bias = tl.load(cell_lse + of_cluster * X + x, mask=x < X, other=float("-inf"))
    met = inner_of(q, query, query_n, token, member, k, cell_keys, D, x, x < X, D, SLICE)
    return k, (met - products[None, :]) * scale + bias[None, :], bias != float("-inf")


@triton.jit
def load_mean(centroids, of_cluster, D, like, WIDTH: tl.constexpr):
    """q̄ as the other kernels see it: rounded to the kind of the queries."""
    width = tl.arange(0, WIDTH)
    mean = tl.load(centroids + of_cluster * D + width, mask=width < D, other=0.0)
    return mean.to(like.dtype).to(tl.float32)
