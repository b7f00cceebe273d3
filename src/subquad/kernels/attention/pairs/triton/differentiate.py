"""The backward pass: one kernel for the gradients of queries, one for those of keys, values and biases.

    p_ij = e^{s_ij − lse_i}      δ_i = dout_i·out_i − dlse_i      ds_ij = p_ij (dout_i·v_j − δ_i)
    dq_i = scale Σ_j ds_ij k_j   dk_j = scale Σ_i ds_ij q_i       dv_j = Σ_i p_ij dout_i      db_j = Σ_i ds_ij

lse and out are those of all sets together. Logits are computed again in each kernel, so that every sum has one owner
and needs no atomics. What a token gets in a slot lies in memory in fp32, and `combine.py` sums a token's slots.

              keys of bucket c                      keys of bucket c
            ┌─────┬─────┬─────┐                   ┌─────┬─────┬─────┐
    block t │ ──► │ ──► │ ──► │           block t │  │  │  │  │  │  │   its blocks, which the host
            ├─────┼─────┼─────┤                   ├──▼──┼──▼──┼──▼──┤   sorts by bucket
            │ ──► │ ──► │ ──► │           block u │  │  │  │  │  │  │
            └─────┴─────┴─────┘                   └──▼──┴──▼──┴──▼──┘
             gradient_of_queries                    gradient_of_keys
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.attention.pairs.triton.bucket_sets import BucketSet
from subquad.kernels.attention.pairs.triton.pair_tiles import (
    call_arguments,
    load_block,
    load_slots,
    position_of,
    tile_of,
    visible,
)
from subquad.kernels.triton.launch import dot, dot_upcast, kernel, launch, load_rows, store_rows
from subquad.kernels.triton.recording import LaunchCost


def differentiate_queries(x: Any, buckets: BucketSet, inputs: dict[str, Any], parts: Tensor) -> None:
    """Fill what the set's query slots hold of the parts (B,H,slots,D) of the gradient of the queries."""
    (B, H, _, D), E, tiles = x.query.shape, x.value.shape[3], tile_of("gradient_of_queries", x, buckets)
    read = (buckets.queries.numel() + buckets.keys.numel()) * (D + E) * x.query.element_size()
    launch(
        gradient_of_queries,
        (buckets.queries.shape[2] * triton.cdiv(buckets.queries.shape[3], tiles.rows), B * H),
        **tiles.options(),
        cost=LaunchCost(buckets.pairs * (2 * D + E), read + 4 * buckets.queries.numel() * D),
        **call_arguments(x, buckets.excess),
        **buckets.arguments(),
        **inputs,
        bucket=buckets.bucket,
        first_query=buckets.first_query,
        parts=parts,
        slots=parts.shape[2],
        QUERIES=tiles.rows,
        KEYS=tiles.keys,
    )


def differentiate_keys(
    x: Any, buckets: BucketSet, inputs: dict[str, Any], of_keys: Tensor, of_values: Tensor, of_bias: Tensor | None
) -> None:
    """Fill what the set's key slots hold of the parts of the gradients of keys, values and biases."""
    (B, H, _, D), E, tiles = x.query.shape, x.value.shape[3], tile_of("gradient_of_keys", x, buckets)
    read = (buckets.queries.numel() + buckets.keys.numel()) * (D + E) * x.query.element_size()
    launch(
        gradient_of_keys,
        (buckets.keys.shape[2] * triton.cdiv(buckets.keys.shape[3], tiles.keys), B * H),
        **tiles.options(),
        cost=LaunchCost(2 * buckets.pairs * (D + E), read + 4 * buckets.keys.numel() * (D + E)),
        **call_arguments(x, buckets.excess),
        **buckets.arguments(),
        **inputs,
        **buckets.blocks_by_bucket(),
        of_keys=of_keys,
        of_values=of_values,
        of_bias=of_bias,
        first_key=buckets.first_key,
        slots=of_keys.shape[2],
        QUERIES=tiles.rows,
        KEYS=tiles.keys,
    )


@triton.jit
def gradient_of_logits(logits, allowed, lse, products, delta):
    """(p, ds) of a tile; lse and delta along the queries' axis, products are dout·v."""
    # A logit of −∞ has no weight, also where it is all that a query sees.
    weights = tl.where(allowed & (logits != -float("inf")), tl.exp(logits - lse), 0.0)
    return weights, tl.where(allowed, weights * (products - delta), 0.0)


@kernel
def gradient_of_queries(
    query,
    query_b,
    query_h,
    query_n,
    key,
    key_b,
    key_h,
    key_n,
    value,
    value_b,
    value_h,
    value_n,
    key_bias,
    offsets,
    hidden,
    queries,
    queries_end,
    keys,
    keys_end,
    bucket,
    grad,
    grad_b,
    grad_h,
    grad_n,
    lse,
    delta,
    parts,
    first_query,
    slots,
    H,
    GROUP,
    N,
    M,
    D,
    E,
    R,
    T,
    S,
    C,
    K,
    offset,
    span,
    scale,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    OTHERS: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dq in one tile of a block's query slots."""
    head = tl.program_id(1).to(tl.int64)
    item, h = head // H, head % H
    tiles = tl.cdiv(S, QUERIES)
    block = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * QUERIES + tl.arange(0, QUERIES)
    token, of_bucket, end = load_block(queries, queries_end, keys_end, bucket, head, block, row, N, T, S, C)
    position = position_of(token, offset, offsets, item, M, span)
    present = token >= 0
    key += item * key_b + h // GROUP * key_h
    value += item * value_b + h // GROUP * value_h
    if hidden is not None:
        hidden += head * R * M
    q = load_rows(query + item * query_b + h * query_h, query_n, token, present, D, D_PADDED)
    g = load_rows(grad + item * grad_b + h * grad_h, grad_n, token, present, E, E_PADDED)
    lse_of = tl.load(lse + head * N + token, mask=present, other=0.0)
    delta_of = tl.load(delta + head * N + token, mask=present, other=0.0)
    total = tl.zeros((QUERIES, D_PADDED), tl.float32)
    for start in range(0, end, KEYS):
        number = load_slots(keys + of_bucket * K, start + tl.arange(0, KEYS), end, M)
        k = load_rows(key, key_n, number, number >= 0, D, D_PADDED)
        v = load_rows(value, value_n, number, number >= 0, E, E_PADDED)
        logits = dot(q, tl.trans(k)) * scale
        if key_bias is not None:
            logits += tl.load(key_bias + head * M + number, mask=number >= 0, other=0.0)[None, :]
        pairs = token[:, None], position[:, None], number[None, :], hidden
        allowed = visible(*pairs, M, R, span, CAUSAL, WINDOW, OTHERS)
        products = dot(g, tl.trans(v))
        _, of_logits = gradient_of_logits(logits, allowed, lse_of[:, None], products, delta_of[:, None])
        total += dot_upcast(of_logits, k)
    store_rows(parts, D, head * slots + first_query + block * S + row, row < S, total * scale, D, D_PADDED)


@kernel
def gradient_of_keys(
    query,
    query_b,
    query_h,
    query_n,
    key,
    key_b,
    key_h,
    key_n,
    value,
    value_b,
    value_h,
    value_n,
    key_bias,
    offsets,
    hidden,
    queries,
    queries_end,
    keys,
    keys_end,
    order,
    starts,
    grad,
    grad_b,
    grad_h,
    grad_n,
    lse,
    delta,
    of_keys,
    of_values,
    of_bias,
    first_key,
    slots,
    H,
    GROUP,
    N,
    M,
    D,
    E,
    R,
    T,
    S,
    C,
    K,
    offset,
    span,
    scale,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    OTHERS: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """dk, dv and db in one tile of a bucket's key slots, over all blocks of the bucket."""
    head = tl.program_id(1).to(tl.int64)
    item, h = head // H, head % H
    tiles = tl.cdiv(K, KEYS)
    bucket = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * KEYS + tl.arange(0, KEYS)
    number = load_slots(keys + (head * C + bucket) * K, row, tl.load(keys_end + head * C + bucket), M)
    present = number >= 0
    first = tl.load(starts + head * (C + 1) + bucket)
    last = tl.where(tl.max(number) >= 0, tl.load(starts + head * (C + 1) + bucket + 1), 0)
    query += item * query_b + h * query_h
    grad += item * grad_b + h * grad_h
    if hidden is not None:
        hidden += head * R * M
    k = load_rows(key + item * key_b + h // GROUP * key_h, key_n, number, present, D, D_PADDED)
    v = load_rows(value + item * value_b + h // GROUP * value_h, value_n, number, present, E, E_PADDED)
    if key_bias is not None:
        bias = tl.load(key_bias + head * M + number, mask=present, other=0.0)
    of_key = tl.zeros((KEYS, D_PADDED), tl.float32)
    of_value = tl.zeros((KEYS, E_PADDED), tl.float32)
    biases = tl.zeros((KEYS,), tl.float32)
    for i in range(first, last):
        block = head * T + tl.load(order + head * T + i)
        end = tl.load(queries_end + block)
        for start in range(0, end, QUERIES):
            token = load_slots(queries + block * S, start + tl.arange(0, QUERIES), end, N)
            position = position_of(token, offset, offsets, item, M, span)
            q = load_rows(query, query_n, token, token >= 0, D, D_PADDED)
            g = load_rows(grad, grad_n, token, token >= 0, E, E_PADDED)
            lse_of = tl.load(lse + head * N + token, mask=token >= 0, other=0.0)
            delta_of = tl.load(delta + head * N + token, mask=token >= 0, other=0.0)
            logits = dot(k, tl.trans(q)) * scale
            if key_bias is not None:
                logits += bias[:, None]
            pairs = token[None, :], position[None, :], number[:, None], hidden
            allowed = visible(*pairs, M, R, span, CAUSAL, WINDOW, OTHERS)
            products = dot(v, tl.trans(g))
            weights, of_logits = gradient_of_logits(logits, allowed, lse_of[None, :], products, delta_of[None, :])
            of_value += dot_upcast(weights, g)
            of_key += dot_upcast(of_logits, q)
            if of_bias is not None:
                biases += tl.sum(of_logits, 1)
    slot = head * slots + first_key + bucket * K + row
    store_rows(of_keys, D, slot, row < K, of_key * scale, D, D_PADDED)
    store_rows(of_values, E, slot, row < K, of_value, E, E_PADDED)
    if of_bias is not None:
        tl.store(of_bias + slot, biases, mask=row < K)
