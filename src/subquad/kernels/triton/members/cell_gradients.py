"""The gradients of a tail's cells: a program takes cells of one cluster, and goes through all its queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import (
    dot_upcast,
    inner_of,
    kernel,
    launch,
    load_ends,
    load_positions,
    load_rows,
    of_head,
    padded,
    rows,
    slice_of,
    store_rows,
    strides,
)
from subquad.kernels.triton.members.clustering import Clustering, cell_logits, load_mean
from subquad.kernels.triton.members.gradients import MemberGradients, load_member, logit_gradients
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import tiles_of


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
        cost=LaunchCost(B * H * N * X * 2 * (D + E), B * H * N * (D + E) * query.element_size()),
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
        SLICE=slice_of(query),
        **tiles.options(),
    )
    return grads


@kernel
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
    SLICE: tl.constexpr,
):
    """Σ_i dt_ix·scale·(q_i − q̄), Σ_i p_ix g_i and Σ_i dt_ix over a cluster's queries, for a tile of its cells."""
    head, cluster = tl.program_id(2).to(tl.int64), tl.program_id(0)
    of_cluster = head * C + cluster
    x = tl.program_id(1) * CELLS + tl.arange(0, CELLS)
    kind = query.dtype.element_ty
    cell_values += of_cluster * X * E
    v = load_rows(cell_values, E, x, x < X, E, VALUES).to(kind)
    keys = tl.zeros((CELLS, WIDTH), tl.float32)
    values = tl.zeros((CELLS, VALUES), tl.float32)
    biases = tl.zeros((CELLS,), tl.float32)
    query, grad = of_head(query, head, H, query_b, query_h), of_head(grad, head, H, grad_b, grad_h)
    order += head * N
    first, end = load_ends(offsets, head, cluster, C)
    for begin in range(first, end, QUERIES):
        token, member = load_positions(order, begin + tl.arange(0, QUERIES), end)
        q = load_rows(query, query_n, token, member, D, WIDTH)
        g = load_rows(grad, grad_n, token, member, E, VALUES)
        queries, grads = (q, query, query_n, token, member), (g, grad, grad_n, token, member)
        of_shift, of_rho, h = load_member(shift, rho, grad_lse, head * N + token, member)
        mean = load_mean(centroids, of_cluster, D, q, WIDTH)
        _, logits, present = cell_logits(*queries, mean, cell_keys, cell_lse, of_cluster, x, X, D, scale, WIDTH, SLICE)
        allowed = present[None, :] & member[:, None]
        gv = inner_of(*grads, v, cell_values, E, x, present, E, SLICE)
        p, of_logits = logit_gradients(logits, gv, of_shift, of_rho, h, 1.0, allowed)
        apart = tl.where(member[:, None], q.to(tl.float32) - mean[None, :], 0.0).to(kind)
        keys += dot_upcast(tl.trans(of_logits), apart)
        values += dot_upcast(tl.trans(p), g)
        biases += tl.sum(of_logits, 0)
    store_rows(of_keys + of_cluster * X * D, D, x, x < X, keys * scale, D, WIDTH)
    store_rows(of_values + of_cluster * X * E, E, x, x < X, values, E, VALUES)
    tl.store(of_lse + of_cluster * X + x, biases, mask=x < X)
