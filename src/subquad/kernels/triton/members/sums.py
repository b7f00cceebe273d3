"""Log-sum-exps and ρ of improved attention, which saves neither: a program takes a block of queries of one cluster."""

import torch
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import (
    allowed_exponentials,
    inner_of,
    kernel,
    key_head,
    launch,
    load_rows,
    of_head,
    rows,
    slice_of,
    strides,
)
from subquad.kernels.triton.members.clustering import Clustering, load_block, load_listed, sizes
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import tiles_of


def member_sums(
    query: Tensor, key: Tensor, value: Tensor, clusters: Clustering, scale: float, grad_out: Tensor
) -> tuple[Tensor, Tensor]:
    """For improved attention, which saves neither: ln Σ_j e^{s_ij} and ρ_i = g_i·Σ_j p_ij v_j, (B,H,N) in fp32."""
    query, key, value, grad_out = rows(query), rows(key), rows(value), rows(grad_out)
    (B, H, N, D), E, K = query.shape, value.shape[3], clusters.top.shape[3]
    shift, rho = query.new_zeros(2, B, H, N, dtype=torch.float32)
    tiles = tiles_of("members_sums", query.dtype, max(D, E))
    blocks = clusters.blocks(tiles.rows)
    arguments = clusters.arguments()
    launch(
        members_sums,
        (blocks.count, B * H),
        cost=LaunchCost(B * H * N * K * (D + E), B * H * N * (D + E) * query.element_size()),
        **sizes(query, key, value, scale),
        **{name: arguments[name] for name in ("order", "top", "C", "K")},
        QUERIES=tiles.rows,
        KEYS=tiles.keys,
        SLICE=slice_of(query),
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


@kernel
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
    SLICE: tl.constexpr,
):
    """ln Σ_j e^{s_ij} and Σ_j p_ij g_i·v_j over the listed keys, for a block of a cluster's queries."""
    head = tl.program_id(1).to(tl.int64)
    of_key = key_head(head, H, G)
    key, value = of_head(key, of_key, G, key_b, key_h), of_head(value, of_key, G, value_b, value_h)
    cluster, token, member = load_block(order, group, start, stop, blocks, head, N, QUERIES)
    if cluster < C:
        query, grad = of_head(query, head, H, query_b, query_h), of_head(grad, head, H, grad_b, grad_h)
        q = load_rows(query, query_n, token, member, D, WIDTH)
        g = load_rows(grad, grad_n, token, member, E, VALUES)
        queries, grads = (q, query, query_n, token, member), (g, grad, grad_n, token, member)
        largest = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        sums = tl.zeros((QUERIES,), tl.float32)
        for first in range(0, K, KEYS):
            listed, present = load_listed(top, head * C + cluster, first + tl.arange(0, KEYS), K, M)
            k = load_rows(key, key_n, listed, present, D, WIDTH)
            v = load_rows(value, value_n, listed, present, E, VALUES)
            allowed = present[None, :] & member[:, None]
            logits = inner_of(*queries, k, key, key_n, listed, present, D, SLICE) * scale
            gv = inner_of(*grads, v, value, value_n, listed, present, E, SLICE)
            largest, factor, weights = allowed_exponentials(logits, allowed, largest)
            total = total * factor + tl.sum(weights, 1)
            sums = sums * factor + tl.sum(weights * gv, 1)
        some = total != 0
        tl.store(shift + head * N + token, tl.where(some, tl.log(tl.where(some, total, 1.0)) + largest, 0.0), member)
        tl.store(rho + head * N + token, tl.where(some, sums / tl.where(some, total, 1.0), 0.0), mask=member)
