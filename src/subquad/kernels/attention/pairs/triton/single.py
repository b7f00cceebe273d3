"""Blocks of one query whose buckets have one key, as a token that meets itself alone: no products of tiles are needed.

    s_t = scale·q_i·k_j + b_j      out = v_j      lse = s_t          the one query i and the one key j of block t

A program takes a run of blocks. Backward, it computes all gradients of its pairs.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.attention.pairs.triton.bucket_sets import BucketSet
from subquad.kernels.attention.pairs.triton.differentiate import gradient_of_logits
from subquad.kernels.attention.pairs.triton.pair_tiles import call_arguments, load_slots, position_of, visible
from subquad.kernels.triton.launch import kernel, launch, load_rows, store_rows, tile
from subquad.kernels.triton.recording import LaunchCost

MOST_BLOCKS = 32  # of a tile


def is_single(buckets: BucketSet) -> bool:
    """True if each block has one query, and its bucket, which is its own, one key."""
    return (
        buckets.bucket is None and buckets.queries.shape[2:] == buckets.keys.shape[2:] and buckets.queries.shape[3] == 1
    )


def attend_single(x: Any, buckets: BucketSet, partials: Tensor, lses: Tensor) -> None:
    """Like `attend_blocks`."""
    D, E, size = x.query.shape[3], x.value.shape[3], x.query.element_size()
    launch(
        attend_pair,
        _grid(buckets),
        cost=LaunchCost(bytes=buckets.pairs * ((2 * D + E) * size + 4 * (E + 1))),
        **call_arguments(x, buckets.excess),
        **_arguments(buckets),
        partials=partials,
        lses=lses,
        slots=lses.shape[2],
    )


def differentiate_single(
    x: Any,
    buckets: BucketSet,
    inputs: dict[str, Any],
    parts: Tensor,
    of_keys: Tensor,
    of_values: Tensor,
    of_bias: Tensor | None,
) -> None:
    """Like `differentiate_queries` and `differentiate_keys`."""
    D, E, size = x.query.shape[3], x.value.shape[3], x.query.element_size()
    launch(
        gradient_of_pair,
        _grid(buckets),
        cost=LaunchCost(bytes=buckets.pairs * (2 * (D + E) * size + 4 * (2 * D + E))),
        **call_arguments(x, buckets.excess),
        **_arguments(buckets),
        **inputs,
        parts=parts,
        of_keys=of_keys,
        of_values=of_values,
        of_bias=of_bias,
        first_key=buckets.first_key,
        slots=parts.shape[2],
        key_slots=of_keys.shape[2],
    )


def _grid(buckets: BucketSet) -> tuple[int, int]:
    B, H, T, _ = buckets.queries.shape
    return triton.cdiv(T, tile(T, MOST_BLOCKS)), B * H


def _arguments(buckets: BucketSet) -> dict[str, Any]:
    """The set as arguments of the kernels."""
    T = buckets.queries.shape[2]
    lists = {"queries": buckets.queries, "keys": buckets.keys, "T": T, "first_query": buckets.first_query}
    return lists | {"span": buckets.span, "WINDOW": buckets.span >= 0, "BLOCKS": tile(T, MOST_BLOCKS)}


@triton.jit
def logits_of_pairs(q, k, key_bias, head, number, M, scale):
    """scale·q·k + b of one key for each query."""
    logits = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
    if key_bias is not None:
        logits += tl.load(key_bias + head * M + number, mask=number >= 0, other=0.0)
    return logits


@kernel
def attend_pair(
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
    keys,
    partials,
    lses,
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
    offset,
    span,
    scale,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    OTHERS: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The partials of a run of blocks."""
    head = tl.program_id(1).to(tl.int64)
    item, h = head // H, head % H
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    token = load_slots(queries + head * T, block, T, N)
    number = load_slots(keys + head * T, block, T, M)
    position = position_of(token, offset, offsets, item, M, span)
    if hidden is not None:
        hidden += head * R * M
    q = load_rows(query + item * query_b + h * query_h, query_n, token, token >= 0, D, D_PADDED)
    k = load_rows(key + item * key_b + h // GROUP * key_h, key_n, number, number >= 0, D, D_PADDED)
    v = load_rows(value + item * value_b + h // GROUP * value_h, value_n, number, number >= 0, E, E_PADDED)
    logits = logits_of_pairs(q, k, key_bias, head, number, M, scale)
    allowed = visible(token, position, number, hidden, M, R, span, CAUSAL, WINDOW, OTHERS)
    weight = 1.0 + (logits - logits)  # NaN for a logit of ±∞ or NaN, as softmax has it
    out = tl.where(allowed[:, None], weight[:, None] * v.to(tl.float32), 0.0)
    slot = head * slots + first_query + block
    tl.store(lses + slot, tl.where(allowed, logits, -float("inf")), mask=block < T)
    store_rows(partials, E, slot, block < T, out, E, E_PADDED)


@kernel
def gradient_of_pair(
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
    keys,
    grad,
    grad_b,
    grad_h,
    grad_n,
    lse,
    delta,
    parts,
    of_keys,
    of_values,
    of_bias,
    first_query,
    first_key,
    slots,
    key_slots,
    H,
    GROUP,
    N,
    M,
    D,
    E,
    R,
    T,
    offset,
    span,
    scale,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    OTHERS: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """All gradients in a run of blocks."""
    head = tl.program_id(1).to(tl.int64)
    item, h = head // H, head % H
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    token = load_slots(queries + head * T, block, T, N)
    number = load_slots(keys + head * T, block, T, M)
    position = position_of(token, offset, offsets, item, M, span)
    if hidden is not None:
        hidden += head * R * M
    q = load_rows(query + item * query_b + h * query_h, query_n, token, token >= 0, D, D_PADDED)
    k = load_rows(key + item * key_b + h // GROUP * key_h, key_n, number, number >= 0, D, D_PADDED)
    v = load_rows(value + item * value_b + h // GROUP * value_h, value_n, number, number >= 0, E, E_PADDED)
    g = load_rows(grad + item * grad_b + h * grad_h, grad_n, token, token >= 0, E, E_PADDED).to(tl.float32)
    lse_of = tl.load(lse + head * N + token, mask=token >= 0, other=0.0)
    delta_of = tl.load(delta + head * N + token, mask=token >= 0, other=0.0)
    logits = logits_of_pairs(q, k, key_bias, head, number, M, scale)
    allowed = visible(token, position, number, hidden, M, R, span, CAUSAL, WINDOW, OTHERS)
    products = tl.sum(g * v.to(tl.float32), 1)
    weights, of_logits = gradient_of_logits(logits, allowed, lse_of, products, delta_of)
    slot, present = head * slots + first_query + block, block < T
    store_rows(parts, D, slot, present, (of_logits * scale)[:, None] * k, D, D_PADDED)
    slot = head * key_slots + first_key + block
    store_rows(of_keys, D, slot, present, (of_logits * scale)[:, None] * q, D, D_PADDED)
    store_rows(of_values, E, slot, present, weights[:, None] * g, E, E_PADDED)
    if of_bias is not None:
        tl.store(of_bias + slot, of_logits, mask=present)
