"""Members of a cluster, which share its listed keys and, in clustered-tail, its cells: attention and its gradient.

For query i of cluster c, with its list T and its cells x as (k̄, v̄, λ):

    s_ij = scale·q_i·k_j,   t_ix = scale·(q_i − q̄_c)·k̄_x + λ_x,   p = softmax over both

    tail        out_i = Σ_j p_ij v_j + Σ_x p_ix v̄_x                lse_i = ln Σ e^{s_ij} + …
    improved    out_i = m_c Σ_j p_ij v_j + rest_c                   lse_i = ln Σ e^{s_ij} − ln m_c

With g = ∂L/∂out, h = ∂L/∂lse and ρ_i = g_i·Σ p v the gradients of the logits are p_ij (m_c (g_i·v_j − ρ_i) + h_i); in
a tail m is 1.

A program takes a block of queries of one cluster, or one cluster's keys and then all its queries in their order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.triton.blocks import GroupBlocks, group_blocks
from subquad.ops.triton.launch import (
    dot,
    dot_wide,
    launch,
    load_rows,
    padded,
    rows,
    seen_exponentials,
    store_rows,
    strides,
)
from subquad.ops.triton.recording import Work
from subquad.ops.triton.tiles import tiles_of


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
        rest: (B,H,C,E), or None.
    """

    order: Tensor
    offsets: Tensor
    centroids: Tensor
    top: Tensor
    cells: tuple[Tensor, Tensor, Tensor] | None = None
    mass: Tensor | None = None
    rest: Tensor | None = None

    def blocks(self, size: int, rest: bool = False) -> GroupBlocks:
        """Blocks of queries of one cluster, and with `rest` of those in none."""
        return group_blocks(self.offsets, self.order.shape[2], size, rest)

    def arguments(self) -> dict[str, object]:
        """What all kernels read."""
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


def _sizes(query: Tensor, key: Tensor, value: Tensor, scale: float) -> dict[str, object]:
    (_, H, N, D), (_, G, M, E) = query.shape, value.shape
    return {
        **{"query": query, "key": key, "value": value, "scale": scale},
        **strides("query", query),
        **strides("key", key),
        **strides("value", value),
        **{"H": H, "G": G, "N": N, "M": M, "D": D, "E": E, "WIDTH": padded(D), "VALUES": padded(E)},
    }


def attend_members(
    query: Tensor, key: Tensor, value: Tensor, clusters: Clustering, scale: float, out: Tensor, lse: Tensor | None
) -> None:
    """Fill out (any layout) and lse, (B,H,N); a query in no cluster has 0, and an lse of 0, or in a tail of −∞."""
    query, key, value = rows(query), rows(key), rows(value)
    (B, H, N, D), E, K = query.shape, value.shape[3], clusters.top.shape[3]
    tiles = tiles_of("members_forward", query.dtype, max(D, E))
    blocks = clusters.blocks(tiles.rows, rest=True)
    arguments = clusters.arguments()
    met = B * H * N * (K + int(str(arguments["X"])))
    launch(
        members_forward,
        (blocks.count, B * H),
        work=Work(met * (D + E), B * H * (N * (D + E) + clusters.top[0, 0].numel() * (D + E)) * query.element_size()),
        **_sizes(query, key, value, scale),
        **arguments,
        QUERIES=tiles.rows,
        KEYS=tiles.keys,
        **tiles.options(),
        rest=clusters.rest,
        group=blocks.group,
        start=blocks.start,
        stop=blocks.stop,
        blocks=blocks.count,
        out=out,
        **strides("out", out),
        lse=lse,
    )


@triton.jit
def load_listed(top, of_cluster, slot, K, M):
    """The keys of these slots, and whether they are keys at all."""
    token = tl.load(top + of_cluster * K + slot, mask=slot < K, other=-1)
    there = (token >= 0) & (token < M)
    return tl.where(there, token, 0), there


@triton.jit
def cell_logits(q, mean, cell_keys, cell_lse, of_cluster, x, X, D, scale, WIDTH: tl.constexpr):
    """(k̄ as queries meet it, scale·(q − q̄)·k̄ + λ): −∞ for a cell that is not there."""
    k = load_rows(cell_keys + of_cluster * X * D, D, x, x < X, D, WIDTH).to(q.dtype)
    own = tl.sum(k.to(tl.float32) * mean[None, :], 1)
    bias = tl.load(cell_lse + of_cluster * X + x, mask=x < X, other=float("-inf"))
    return k, (dot(q, tl.trans(k)) - own[None, :]) * scale + bias[None, :], bias != float("-inf")


@triton.jit
def load_mean(centroids, of_cluster, D, like, WIDTH: tl.constexpr):
    """q̄ as the other kernels see it: rounded to the kind of the queries."""
    width = tl.arange(0, WIDTH)
    mean = tl.load(centroids + of_cluster * D + width, mask=width < D, other=0.0)
    return mean.to(like.dtype).to(tl.float32)


@triton.jit
def members_forward(
    query,
    key,
    value,
    query_b,
    query_h,
    query_n,
    key_b,
    key_h,
    key_n,
    value_b,
    value_h,
    value_n,
    order,
    top,
    centroids,
    cell_keys,
    cell_values,
    cell_lse,
    mass,
    rest,
    group,
    start,
    stop,
    blocks,
    out,
    out_b,
    out_h,
    out_n,
    lse,
    scale,
    H,
    G,
    N,
    M,
    C,
    K,
    X,
    D,
    E,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CELLS: tl.constexpr,
):
    """One softmax over a cluster's listed keys and its cells, for a block of its queries."""
    head = tl.program_id(1).to(tl.int64)
    of_key = head // H * G + head % H // (H // G)
    key += of_key // G * key_b + of_key % G * key_h
    value += of_key // G * value_b + of_key % G * value_h
    block = head * blocks + tl.program_id(0)
    cluster = tl.load(group + block)
    place = tl.load(start + block) + tl.arange(0, QUERIES)
    member = place < tl.load(stop + block)
    token = tl.load(order + head * N + place, mask=member, other=0)
    of_head = out + head // H * out_b + head % H * out_h
    if cluster >= C:
        store_rows(of_head, out_n, token, member, tl.zeros((QUERIES, VALUES), tl.float32), E, VALUES)
        if lse is not None:
            no_lse: tl.constexpr = float("-inf") if mass is None else 0.0
            tl.store(lse + head * N + token, tl.full((QUERIES,), no_lse, tl.float32), mask=member)
    else:
        of_cluster = head * C + cluster
        q = load_rows(query + head // H * query_b + head % H * query_h, query_n, token, member, D, WIDTH)
        largest = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        values = tl.zeros((QUERIES, VALUES), tl.float32)
        some = 0
        for first in range(0, K, KEYS):
            listed, there = load_listed(top, of_cluster, first + tl.arange(0, KEYS), K, M)
            k = load_rows(key, key_n, listed, there, D, WIDTH)
            v = load_rows(value, value_n, listed, there, E, VALUES)
            seen = there[None, :] & member[:, None]
            largest, factor, weights = seen_exponentials(dot(q, tl.trans(k)) * scale, seen, largest)
            total = total * factor + tl.sum(weights, 1)
            values = values * factor[:, None] + dot_wide(weights, v)
            some += tl.sum(there.to(tl.int32), 0)
        if cell_lse is not None:
            mean = load_mean(centroids, of_cluster, D, q, WIDTH)
            for first in range(0, X, CELLS):
                x = first + tl.arange(0, CELLS)
                _, logits, there = cell_logits(q, mean, cell_keys, cell_lse, of_cluster, x, X, D, scale, WIDTH)
                v = load_rows(cell_values + of_cluster * X * E, E, x, there, E, VALUES).to(q.dtype)
                largest, factor, weights = seen_exponentials(logits, there[None, :] & member[:, None], largest)
                total = total * factor + tl.sum(weights, 1)
                values = values * factor[:, None] + dot_wide(weights, v)
                some += tl.sum(there.to(tl.int32), 0)
        # 0 where there was no key; NaN where there were keys and all their logits are −∞.
        nothing = (total == 0) & (some == 0)
        result = values / tl.where(nothing, 1.0, total)[:, None]
        sums = tl.where(nothing, float("-inf"), tl.log(tl.where(nothing, 1.0, total)) + largest)
        if mass is not None:
            share = tl.load(mass + of_cluster)
            column = tl.arange(0, VALUES)
            remainder = tl.load(rest + of_cluster * E + column, mask=column < E, other=0.0)
            result = result * share + remainder[None, :]
            sums -= tl.log(tl.where(share == 0, 1.0, share))
        store_rows(of_head, out_n, token, member, result, E, VALUES)
        if lse is not None:
            tl.store(lse + head * N + token, sums, mask=member)


@dataclass(frozen=True)
class MemberGradients:
    """What the backward pass knows of each query: p = e^{logit − shift}, ρ, h, and the gradient of its output.

    Attributes:
        shift: (B,H,N) fp32, the log-sum-exp of its logits.
        rho: (B,H,N) fp32.
        grad_out: (B,H,N,E).
        grad_lse: (B,H,N) fp32, or None. In a tail it is part of ρ.
    """

    shift: Tensor
    rho: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None = None

    def arguments(self) -> dict[str, object]:
        """What the kernels read."""
        return {
            **{"shift": self.shift, "rho": self.rho, "grad_lse": self.grad_lse, "grad": rows(self.grad_out)},
            **strides("grad", rows(self.grad_out)),
        }


def member_sums(
    query: Tensor, key: Tensor, value: Tensor, clusters: Clustering, scale: float, grad_out: Tensor
) -> tuple[Tensor, Tensor]:
    """For improved attention, which saves neither: ln Σ_j e^{s_ij} and ρ_i = g_i·Σ_j p_ij v_j, (B,H,N) in fp32."""
    query, key, value, grad_out = rows(query), rows(key), rows(value), rows(grad_out)
    (B, H, N, D), E, K = query.shape, value.shape[3], clusters.top.shape[3]
    shift, rho = query.new_zeros(2, B, H, N, dtype=torch.float32)
    tiles = tiles_of("members_forward", query.dtype, max(D, E))
    blocks = clusters.blocks(tiles.rows)
    arguments = clusters.arguments()
    launch(
        members_sums,
        (blocks.count, B * H),
        work=Work(B * H * N * K * (D + E), B * H * N * (D + E) * query.element_size()),
        **_sizes(query, key, value, scale),
        **{name: arguments[name] for name in ("order", "top", "C", "K")},
        QUERIES=tiles.rows,
        KEYS=tiles.keys,
        **tiles.options(),
        grad=grad_out,
        **strides("grad", grad_out),
        group=blocks.group,
        start=blocks.start,
        stop=blocks.stop,
        blocks=blocks.count,
        shift=shift,
        rho=rho,
    )
    return shift, rho


def members_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    clusters: Clustering,
    scale: float,
    of_members: MemberGradients,
    of_means: Tensor,
    grad_query: Tensor,
) -> None:
    """Fill the gradient of the queries: their own, and each one's share of that of its cluster's mean."""
    query, key, value = rows(query), rows(key), rows(value)
    (B, H, N, D), E, K = query.shape, value.shape[3], clusters.top.shape[3]
    grad_query.zero_()
    tiles = tiles_of("members_to_queries", query.dtype, max(D, E))
    blocks = clusters.blocks(tiles.rows)
    arguments = clusters.arguments()
    met = B * H * N * (K + int(str(arguments["X"])))
    launch(
        members_to_queries,
        (blocks.count, B * H),
        work=Work(met * (2 * D + E), B * H * N * (2 * D + E) * query.element_size()),
        **_sizes(query, key, value, scale),
        **arguments,
        QUERIES=tiles.rows,
        KEYS=tiles.keys,
        **tiles.options(),
        **of_members.arguments(),
        offsets=clusters.offsets,
        group=blocks.group,
        start=blocks.start,
        stop=blocks.stop,
        blocks=blocks.count,
        of_means=of_means,
        grad_query=grad_query,
        **strides("grad_query", grad_query),
    )


def listed_backward(
    query: Tensor, key: Tensor, value: Tensor, clusters: Clustering, scale: float, of_members: MemberGradients
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of each cluster's listed keys and values, as `cells_backward` takes them."""
    query, key, value = rows(query), rows(key), rows(value)
    (B, H, N, D), (_, G, M, E), (C, K) = query.shape, value.shape, clusters.top.shape[2:]
    of_keys, of_values = (query.new_empty(B, H, C, K, width, dtype=torch.float32) for width in (D, E))
    tiles = tiles_of("members_to_listed", query.dtype, max(D, E))
    arguments = clusters.arguments()
    launch(
        members_to_listed,
        (C, triton.cdiv(K, tiles.keys), B * H),
        work=Work(B * H * N * K * 2 * (D + E), B * H * (N * (D + E) * query.element_size() + C * K * (D + E) * 4)),
        **_sizes(query, key, value, scale),
        **{name: arguments[name] for name in ("order", "top", "mass", "C", "K")},
        QUERIES=tiles.rows,
        KEYS=tiles.keys,
        **tiles.options(),
        **of_members.arguments(),
        offsets=clusters.offsets,
        of_keys=of_keys,
        of_values=of_values,
    )
    return of_keys.flatten(2, 3), of_values.flatten(2, 3), *_slots_by_key(clusters.top, G, M)


def _slots_by_key(top: Tensor, G: int, M: int) -> tuple[Tensor, Tensor]:
    """The slots of all heads that share a key head, sorted by their key, and where each key's begin."""
    keys = top.unflatten(1, (G, -1)).flatten(2)
    keys = torch.where((keys >= 0) & (keys < M), keys, M)
    ascending, slots = keys.sort(dim=-1, stable=True)
    numbers = torch.arange(M + 1, dtype=keys.dtype, device=keys.device).expand(*keys.shape[:2], -1).contiguous()
    return slots.int(), torch.searchsorted(ascending, numbers, out_int32=True)


def cells_of_members(
    query: Tensor, clusters: Clustering, scale: float, of_members: MemberGradients
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of k̄ (B,H,C,X,D), v̄ (B,H,C,X,E) and λ (B,H,C,X) of a tail."""
    assert clusters.cells is not None
    query, (cell_keys, cell_values, cell_lse) = rows(query), clusters.cells
    B, H, N, D = query.shape
    C, X, E = cell_values.shape[2:]
    grads = torch.empty_like(cell_keys), torch.empty_like(cell_values), torch.empty_like(cell_lse)
    arguments = {name: each for name, each in clusters.arguments().items() if name not in ("top", "mass", "K")}
    tiles = tiles_of("members_to_cells", query.dtype, max(D, E))
    launch(
        members_to_cells,
        (C, triton.cdiv(X, 16), B * H),
        work=Work(B * H * N * X * 2 * (D + E), B * H * N * (D + E) * query.element_size()),
        query=query,
        **strides("query", query),
        **arguments,
        **of_members.arguments(),
        offsets=clusters.offsets,
        of_keys=grads[0],
        of_values=grads[1],
        of_lse=grads[2],
        scale=scale,
        **{"H": H, "N": N, "D": D, "E": E, "WIDTH": padded(D), "VALUES": padded(E)},
        QUERIES=tiles.rows,
        **tiles.options(),
    )
    return grads


@triton.jit
def members_sums(
    query,
    key,
    value,
    query_b,
    query_h,
    query_n,
    key_b,
    key_h,
    key_n,
    value_b,
    value_h,
    value_n,
    grad,
    grad_b,
    grad_h,
    grad_n,
    order,
    top,
    group,
    start,
    stop,
    blocks,
    shift,
    rho,
    scale,
    H,
    G,
    N,
    M,
    C,
    K,
    D,
    E,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """ln Σ_j e^{s_ij} and Σ_j p_ij g_i·v_j over the listed keys, for a block of a cluster's queries."""
    head = tl.program_id(1).to(tl.int64)
    of_key = head // H * G + head % H // (H // G)
    key += of_key // G * key_b + of_key % G * key_h
    value += of_key // G * value_b + of_key % G * value_h
    block = head * blocks + tl.program_id(0)
    cluster = tl.load(group + block)
    place = tl.load(start + block) + tl.arange(0, QUERIES)
    member = place < tl.load(stop + block)
    if cluster < C:
        token = tl.load(order + head * N + place, mask=member, other=0)
        q = load_rows(query + head // H * query_b + head % H * query_h, query_n, token, member, D, WIDTH)
        g = load_rows(grad + head // H * grad_b + head % H * grad_h, grad_n, token, member, E, VALUES)
        largest = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        sums = tl.zeros((QUERIES,), tl.float32)
        for first in range(0, K, KEYS):
            listed, there = load_listed(top, head * C + cluster, first + tl.arange(0, KEYS), K, M)
            k = load_rows(key, key_n, listed, there, D, WIDTH)
            v = load_rows(value, value_n, listed, there, E, VALUES)
            seen = there[None, :] & member[:, None]
            largest, factor, weights = seen_exponentials(dot(q, tl.trans(k)) * scale, seen, largest)
            total = total * factor + tl.sum(weights, 1)
            sums = sums * factor + tl.sum(weights * dot(g, tl.trans(v)), 1)
        some = total != 0
        tl.store(shift + head * N + token, tl.where(some, tl.log(tl.where(some, total, 1.0)) + largest, 0.0), member)
        tl.store(rho + head * N + token, tl.where(some, sums / tl.where(some, total, 1.0), 0.0), mask=member)


@triton.jit
def logit_gradients(p, gv, rho, h, share, seen):
    """∂L/∂logit = p (m (g·v − ρ) + h); 0 where a query does not see a key."""
    return tl.where(seen, p * (share * (gv - rho[:, None]) + h[:, None]), 0.0)


@triton.jit
def load_member(shift, rho, grad_lse, place, member):
    """What the backward pass knows of each query: (shift, ρ, h)."""
    of_shift = tl.load(shift + place, mask=member, other=0.0)
    of_lse = tl.zeros_like(of_shift)
    if grad_lse is not None:
        of_lse = tl.load(grad_lse + place, mask=member, other=0.0)
    return of_shift, tl.load(rho + place, mask=member, other=0.0), of_lse


@triton.jit
def members_to_queries(
    query,
    key,
    value,
    query_b,
    query_h,
    query_n,
    key_b,
    key_h,
    key_n,
    value_b,
    value_h,
    value_n,
    grad,
    grad_b,
    grad_h,
    grad_n,
    order,
    offsets,
    top,
    centroids,
    cell_keys,
    cell_values,
    cell_lse,
    mass,
    shift,
    rho,
    grad_lse,
    group,
    start,
    stop,
    blocks,
    of_means,
    grad_query,
    grad_query_b,
    grad_query_h,
    grad_query_n,
    scale,
    H,
    G,
    N,
    M,
    C,
    K,
    X,
    D,
    E,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CELLS: tl.constexpr,
):
    """dq_i = scale·(Σ_j ds_ij k_j + Σ_x dt_ix k̄_x) + dq̄ / (queries of the cluster), for a block of its queries."""
    head = tl.program_id(1).to(tl.int64)
    of_key = head // H * G + head % H // (H // G)
    key += of_key // G * key_b + of_key % G * key_h
    value += of_key // G * value_b + of_key % G * value_h
    block = head * blocks + tl.program_id(0)
    cluster = tl.load(group + block)
    place = tl.load(start + block) + tl.arange(0, QUERIES)
    member = place < tl.load(stop + block)
    if cluster < C:
        of_cluster = head * C + cluster
        token = tl.load(order + head * N + place, mask=member, other=0)
        q = load_rows(query + head // H * query_b + head % H * query_h, query_n, token, member, D, WIDTH)
        g = load_rows(grad + head // H * grad_b + head % H * grad_h, grad_n, token, member, E, VALUES)
        of_shift, of_rho, h = load_member(shift, rho, grad_lse, head * N + token, member)
        share = 1.0
        if mass is not None:
            share = tl.load(mass + of_cluster)
        gradient = tl.zeros((QUERIES, WIDTH), tl.float32)
        for first in range(0, K, KEYS):
            listed, there = load_listed(top, of_cluster, first + tl.arange(0, KEYS), K, M)
            k = load_rows(key, key_n, listed, there, D, WIDTH)
            v = load_rows(value, value_n, listed, there, E, VALUES)
            seen = there[None, :] & member[:, None]
            p = tl.exp(tl.where(seen, dot(q, tl.trans(k)) * scale - of_shift[:, None], float("-inf")))
            gradient += dot_wide(logit_gradients(p, dot(g, tl.trans(v)), of_rho, h, share, seen), k)
        if cell_lse is not None:
            mean = load_mean(centroids, of_cluster, D, q, WIDTH)
            for first in range(0, X, CELLS):
                x = first + tl.arange(0, CELLS)
                k, logits, there = cell_logits(q, mean, cell_keys, cell_lse, of_cluster, x, X, D, scale, WIDTH)
                v = load_rows(cell_values + of_cluster * X * E, E, x, there, E, VALUES).to(g.dtype)
                seen = there[None, :] & member[:, None]
                p = tl.exp(tl.where(seen, logits - of_shift[:, None], float("-inf")))
                gradient += dot_wide(logit_gradients(p, dot(g, tl.trans(v)), of_rho, h, share, seen), k)
        size = tl.load(offsets + head * (C + 1) + cluster + 1) - tl.load(offsets + head * (C + 1) + cluster)
        width = tl.arange(0, WIDTH)
        of_mean = tl.load(of_means + of_cluster * D + width, mask=width < D, other=0.0) / size
        gradient = gradient * scale + of_mean[None, :]
        of_head = grad_query + head // H * grad_query_b + head % H * grad_query_h
        store_rows(of_head, grad_query_n, token, member, gradient, D, WIDTH)


@triton.jit
def members_to_listed(
    query,
    key,
    value,
    query_b,
    query_h,
    query_n,
    key_b,
    key_h,
    key_n,
    value_b,
    value_h,
    value_n,
    grad,
    grad_b,
    grad_h,
    grad_n,
    order,
    offsets,
    top,
    mass,
    shift,
    rho,
    grad_lse,
    of_keys,
    of_values,
    scale,
    H,
    G,
    N,
    M,
    C,
    K,
    D,
    E,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Σ_i ds_ij·scale·q_i and Σ_i m p_ij g_i over a cluster's queries, for a tile of its listed keys."""
    head, cluster = tl.program_id(2).to(tl.int64), tl.program_id(0)
    of_key, of_cluster = head // H * G + head % H // (H // G), head * C + cluster
    slot = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    listed, there = load_listed(top, of_cluster, slot, K, M)
    k = load_rows(key + of_key // G * key_b + of_key % G * key_h, key_n, listed, there, D, WIDTH)
    v = load_rows(value + of_key // G * value_b + of_key % G * value_h, value_n, listed, there, E, VALUES)
    share = 1.0
    if mass is not None:
        share = tl.load(mass + of_cluster)
    keys = tl.zeros((KEYS, WIDTH), tl.float32)
    values = tl.zeros((KEYS, VALUES), tl.float32)
    first, end = tl.load(offsets + head * (C + 1) + cluster), tl.load(offsets + head * (C + 1) + cluster + 1)
    for begin in range(first, end, QUERIES):
        place = begin + tl.arange(0, QUERIES)
        member = place < end
        token = tl.load(order + head * N + place, mask=member, other=0)
        q = load_rows(query + head // H * query_b + head % H * query_h, query_n, token, member, D, WIDTH)
        g = load_rows(grad + head // H * grad_b + head % H * grad_h, grad_n, token, member, E, VALUES)
        of_shift, of_rho, h = load_member(shift, rho, grad_lse, head * N + token, member)
        seen = there[None, :] & member[:, None]
        p = tl.exp(tl.where(seen, dot(q, tl.trans(k)) * scale - of_shift[:, None], float("-inf")))
        of_logits = logit_gradients(p, dot(g, tl.trans(v)), of_rho, h, share, seen)
        keys += dot_wide(tl.trans(of_logits), q)
        values += dot_wide(tl.trans(p), g)
    store_rows(of_keys + of_cluster * K * D, D, slot, slot < K, keys * scale, D, WIDTH)
    store_rows(of_values + of_cluster * K * E, E, slot, slot < K, values * share, E, VALUES)


@triton.jit
def members_to_cells(
    query,
    query_b,
    query_h,
    query_n,
    grad,
    grad_b,
    grad_h,
    grad_n,
    order,
    offsets,
    centroids,
    cell_keys,
    cell_values,
    cell_lse,
    shift,
    rho,
    grad_lse,
    of_keys,
    of_values,
    of_lse,
    scale,
    H,
    N,
    C,
    X,
    D,
    E,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    QUERIES: tl.constexpr,
    CELLS: tl.constexpr,
):
    """Σ_i dt_ix·scale·(q_i − q̄), Σ_i p_ix g_i and Σ_i dt_ix over a cluster's queries, for a tile of its cells."""
    head, cluster = tl.program_id(2).to(tl.int64), tl.program_id(0)
    of_cluster = head * C + cluster
    x = tl.program_id(1) * CELLS + tl.arange(0, CELLS)
    kind = query.dtype.element_ty
    v = load_rows(cell_values + of_cluster * X * E, E, x, x < X, E, VALUES).to(kind)
    keys = tl.zeros((CELLS, WIDTH), tl.float32)
    values = tl.zeros((CELLS, VALUES), tl.float32)
    biases = tl.zeros((CELLS,), tl.float32)
    first, end = tl.load(offsets + head * (C + 1) + cluster), tl.load(offsets + head * (C + 1) + cluster + 1)
    for begin in range(first, end, QUERIES):
        place = begin + tl.arange(0, QUERIES)
        member = place < end
        token = tl.load(order + head * N + place, mask=member, other=0)
        q = load_rows(query + head // H * query_b + head % H * query_h, query_n, token, member, D, WIDTH)
        g = load_rows(grad + head // H * grad_b + head % H * grad_h, grad_n, token, member, E, VALUES)
        of_shift, of_rho, h = load_member(shift, rho, grad_lse, head * N + token, member)
        mean = load_mean(centroids, of_cluster, D, q, WIDTH)
        _, logits, there = cell_logits(q, mean, cell_keys, cell_lse, of_cluster, x, X, D, scale, WIDTH)
        seen = there[None, :] & member[:, None]
        p = tl.exp(tl.where(seen, logits - of_shift[:, None], float("-inf")))
        of_logits = logit_gradients(p, dot(g, tl.trans(v)), of_rho, h, 1.0, seen)
        apart = tl.where(member[:, None], q.to(tl.float32) - mean[None, :], 0.0).to(kind)
        keys += dot_wide(tl.trans(of_logits), apart)
        values += dot_wide(tl.trans(p), g)
        biases += tl.sum(of_logits, 0)
    store_rows(of_keys + of_cluster * X * D, D, x, x < X, keys * scale, D, WIDTH)
    store_rows(of_values + of_cluster * X * E, E, x, x < X, values, E, VALUES)
    tl.store(of_lse + of_cluster * X + x, biases, mask=x < X)
