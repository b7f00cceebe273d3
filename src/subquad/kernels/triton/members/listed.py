"""Gradients of listed keys and values: a program takes keys of one cluster's list, and goes through its queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import (
    dot_upcast,
    inner_of,
    kernel,
    key_head,
    launch,
    load_ends,
    load_positions,
    load_rows,
    of_head,
    rows,
    slice_of,
    store_rows,
)
from subquad.kernels.triton.members.clustering import Clustering, load_listed, sizes
from subquad.kernels.triton.members.gradients import MemberGradients, load_member, logit_gradients
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import tiles_of


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
        cost=LaunchCost(
            B * H * N * K * 2 * (D + E), B * H * (N * (D + E) * query.element_size() + C * K * (D + E) * 4)
        ),
        **sizes(query, key, value, scale),
        **{name: arguments[name] for name in ("order", "top", "mass", "C", "K")},
        QUERIES=tiles.rows,
        KEYS=tiles.keys,
        SLICE=slice_of(query),
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


@kernel
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
    SLICE: tl.constexpr,
):
    """Σ_i ds_ij·scale·q_i and Σ_i m p_ij g_i over a cluster's queries, for a tile of its listed keys."""
    head, cluster = tl.program_id(2).to(tl.int64), tl.program_id(0)
    of_key, of_cluster = key_head(head, H, G), head * C + cluster
    slot = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    listed, present = load_listed(top, of_cluster, slot, K, M)
    key, value = of_head(key, of_key, G, key_b, key_h), of_head(value, of_key, G, value_b, value_h)
    k = load_rows(key, key_n, listed, present, D, WIDTH)
    v = load_rows(value, value_n, listed, present, E, VALUES)
    share = 1.0
    if mass is not None:
        share = tl.load(mass + of_cluster)
    keys = tl.zeros((KEYS, WIDTH), tl.float32)
    values = tl.zeros((KEYS, VALUES), tl.float32)
    query, grad = of_head(query, head, H, query_b, query_h), of_head(grad, head, H, grad_b, grad_h)
    order += head * N
    first, end = load_ends(offsets, head, cluster, C)
    for begin in range(first, end, QUERIES):
        token, member = load_positions(order, begin + tl.arange(0, QUERIES), end)
        q = load_rows(query, query_n, token, member, D, WIDTH)
        g = load_rows(grad, grad_n, token, member, E, VALUES)
        queries, grads = (q, query, query_n, token, member), (g, grad, grad_n, token, member)
        of_shift, of_rho, h = load_member(shift, rho, grad_lse, head * N + token, member)
        allowed = present[None, :] & member[:, None]
        logits = inner_of(*queries, k, key, key_n, listed, present, D, SLICE) * scale
        gv = inner_of(*grads, v, value, value_n, listed, present, E, SLICE)
        p, of_logits = logit_gradients(logits, gv, of_shift, of_rho, h, share, allowed)
        keys += dot_upcast(tl.trans(of_logits), q)
        values += dot_upcast(tl.trans(p), g)
    store_rows(of_keys + of_cluster * K * D, D, slot, slot < K, keys * scale, D, WIDTH)
    store_rows(of_values + of_cluster * K * E, E, slot, slot < K, values * share, E, VALUES)
