"""The forward pass of members: a program takes a block of queries of one cluster."""

import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import (
    allowed_exponentials,
    dot_shrunk,
    inner_of,
    kernel,
    key_head,
    launch,
    load_rows,
    of_head,
    rows,
    slice_of,
    store_rows,
    strides,
    unshrunk,
)
from subquad.kernels.triton.members.clustering import Clustering, cell_logits, load_block, load_listed, load_mean, sizes
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import tiles_of


def attend_members(
    query: Tensor, key: Tensor, value: Tensor, clusters: Clustering, scale: float, out: Tensor, lse: Tensor | None
) -> None:
    """Fill out (any layout) and lse, (B,H,N); a query in no cluster has 0, and an lse of 0, or in a tail of −∞."""
    query, key, value = rows(query), rows(key), rows(value)
    (B, H, N, D), E, K = query.shape, value.shape[3], clusters.top.shape[3]
    tiles = tiles_of("members_forward", query.dtype, max(D, E))
    blocks = clusters.blocks(tiles.rows, remaining=True)
    arguments = clusters.arguments()
    met = B * H * N * (K + int(str(arguments["X"])))
    launch(
        members_forward,
        (blocks.count, B * H),
        cost=LaunchCost(
            met * (D + E), B * H * (N * (D + E) + clusters.top[0, 0].numel() * (D + E)) * query.element_size()
        ),
        **sizes(query, key, value, scale),
        **arguments,
        QUERIES=tiles.rows,
        KEYS=tiles.keys,
        SLICE=slice_of(query),
        **tiles.options(),
        remaining=clusters.remaining,
        group=blocks.group,
        start=blocks.start,
        stop=blocks.stop,
        blocks=blocks.count,
        out=out,
        **strides("out", out),
        lse=lse,
    )


@kernel
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
    remaining,
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
    SLICE: tl.constexpr,
):
    """One softmax over a cluster's listed keys and its cells, for a block of its queries."""
    head = tl.program_id(1).to(tl.int64)
    of_key = key_head(head, H, G)
    key, value = of_head(key, of_key, G, key_b, key_h), of_head(value, of_key, G, value_b, value_h)
    cluster, token, member = load_block(order, group, start, stop, blocks, head, N, QUERIES)
    out = of_head(out, head, H, out_b, out_h)
    if cluster >= C:
        store_rows(out, out_n, token, member, tl.zeros((QUERIES, VALUES), tl.float32), E, VALUES)
        if lse is not None:
            of_none = tl.full((QUERIES,), float("-inf") if mass is None else 0.0, tl.float32)
            tl.store(lse + head * N + token, of_none, mask=member)
    else:
        of_cluster = head * C + cluster
        query = of_head(query, head, H, query_b, query_h)
        q = load_rows(query, query_n, token, member, D, WIDTH)
        queries = q, query, query_n, token, member
        largest = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        values = tl.zeros((QUERIES, VALUES), tl.float32)
        some = 0
        for first in range(0, K, KEYS):
            listed, present = load_listed(top, of_cluster, first + tl.arange(0, KEYS), K, M)
            k = load_rows(key, key_n, listed, present, D, WIDTH)
            v = load_rows(value, value_n, listed, present, E, VALUES)
            allowed = present[None, :] & member[:, None]
            logits = inner_of(*queries, k, key, key_n, listed, present, D, SLICE) * scale
            largest, factor, weights = allowed_exponentials(logits, allowed, largest)
            total = total * factor + tl.sum(weights, 1)
            values = values * factor[:, None] + dot_shrunk(weights, v)
            some += tl.sum(present.to(tl.int32), 0)
        if cell_lse is not None:
            mean = load_mean(centroids, of_cluster, D, q, WIDTH)
            for first in range(0, X, CELLS):
                x = first + tl.arange(0, CELLS)
                _, logits, present = cell_logits(
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
                v = load_rows(cell_values + of_cluster * X * E, E, x, present, E, VALUES).to(q.dtype)
                largest, factor, weights = allowed_exponentials(logits, present[None, :] & member[:, None], largest)
                total = total * factor + tl.sum(weights, 1)
                values = values * factor[:, None] + dot_shrunk(weights, v)
                some += tl.sum(present.to(tl.int32), 0)
        # 0 where there was no key; NaN where there were keys and all their logits are −∞.
        nothing = (total == 0) & (some == 0)
        result = unshrunk(values / tl.where(nothing, 1.0, total)[:, None], value)
        sums = tl.where(nothing, float("-inf"), tl.log(tl.where(nothing, 1.0, total)) + largest)
        if mass is not None:
            share = tl.load(mass + of_cluster)
            column = tl.arange(0, VALUES)
            remainder = tl.load(remaining + of_cluster * E + column, mask=column < E, other=0.0)
            result = result * share + remainder[None, :]
            sums -= tl.log(tl.where(share == 0, 1.0, share))
        store_rows(out, out_n, token, member, result, E, VALUES)
        if lse is not None:
            tl.store(lse + head * N + token, sums, mask=member)
