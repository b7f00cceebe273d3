"""The gradients of queries: a program takes a block of queries of one cluster."""

import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import (
    dot_upcast,
    inner_of,
    kernel,
    key_head,
    launch,
    load_ends,
    load_rows,
    of_head,
    rows,
    slice_of,
    store_rows,
    strides,
)
from subquad.kernels.triton.members.clustering import Clustering, cell_logits, load_block, load_listed, load_mean, sizes
from subquad.kernels.triton.members.gradients import MemberGradients, load_member, logit_gradients
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import tiles_of


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
        cost=LaunchCost(met * (2 * D + E), B * H * N * (2 * D + E) * query.element_size()),
        **sizes(query, key, value, scale),
        **arguments,
        QUERIES=tiles.rows,
        KEYS=tiles.keys,
        SLICE=slice_of(query),
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


@kernel
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
    SLICE: tl.constexpr,
):
    """dq_i = scale·(Σ_j ds_ij k_j + Σ_x dt_ix k̄_x) + dq̄ / (queries of the cluster), for a block of its queries."""
    head = tl.program_id(1).to(tl.int64)
    of_key = key_head(head, H, G)
    key, value = of_head(key, of_key, G, key_b, key_h), of_head(value, of_key, G, value_b, value_h)
    cluster, token, member = load_block(order, group, start, stop, blocks, head, N, QUERIES)
    if cluster < C:
        of_cluster = head * C + cluster
        query, grad = of_head(query, head, H, query_b, query_h), of_head(grad, head, H, grad_b, grad_h)
        q = load_rows(query, query_n, token, member, D, WIDTH)
        g = load_rows(grad, grad_n, token, member, E, VALUES)
        queries, grads = (q, query, query_n, token, member), (g, grad, grad_n, token, member)
        of_shift, of_rho, h = load_member(shift, rho, grad_lse, head * N + token, member)
        share = 1.0
        if mass is not None:
            share = tl.load(mass + of_cluster)
        gradient = tl.zeros((QUERIES, WIDTH), tl.float32)
        for first in range(0, K, KEYS):
            listed, present = load_listed(top, of_cluster, first + tl.arange(0, KEYS), K, M)
            k = load_rows(key, key_n, listed, present, D, WIDTH)
            v = load_rows(value, value_n, listed, present, E, VALUES)
            allowed = present[None, :] & member[:, None]
            logits = inner_of(*queries, k, key, key_n, listed, present, D, SLICE) * scale
            gv = inner_of(*grads, v, value, value_n, listed, present, E, SLICE)
            _, of_logits = logit_gradients(logits, gv, of_shift, of_rho, h, share, allowed)
            gradient += dot_upcast(of_logits, k)
        if cell_lse is not None:
            mean = load_mean(centroids, of_cluster, D, q, WIDTH)
            for first in range(0, X, CELLS):
                x = first + tl.arange(0, CELLS)
                k, logits, present = cell_logits(
                    *(
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
                        WIDTH,
                        SLICE,
                    )
                )
                of_cells = cell_values + of_cluster * X * E
                v = load_rows(of_cells, E, x, present, E, VALUES).to(g.dtype)
                gv = inner_of(*grads, v, of_cells, E, x, present, E, SLICE)
                allowed = present[None, :] & member[:, None]
                _, of_logits = logit_gradients(logits, gv, of_shift, of_rho, h, share, allowed)
                gradient += dot_upcast(of_logits, k)
        begin, end = load_ends(offsets, head, cluster, C)
        width = tl.arange(0, WIDTH)
        of_mean = tl.load(of_means + of_cluster * D + width, mask=width < D, other=0.0) / (end - begin)
        gradient = gradient * scale + of_mean[None, :]
        grad_query = of_head(grad_query, head, H, grad_query_b, grad_query_h)
        store_rows(grad_query, grad_query_n, token, member, gradient, D, WIDTH)
