"""Causal attention by features inside a chunk on GPUs; its gradients are in `chunk_slopes`.

    w_ij = Σ_r e^{x_ir + y_jr},  j ≤ i            out_i, lse_i: of the state before the chunk and of these
    p_ij = e^{−lse_i} w_ij                        dv_j  = Σ_i p_ij dO_i
    s_ij = dO_i·v_j + a_i                         dx_ir = Σ_j e^{x_ir − lse_i + y_jr} s_ij,   dy_jr: the same over i

A program takes a chunk of a head and walks through the features; the weights of the chunk's pairs, a square of tokens,
grow on the way. `feature_tiles` describes how they are stabilised.

No number of a later token may reach an earlier one's results by a weight of 0, since 0·NaN is NaN. So factors that meet
weights of 0 have 0 for infinite numbers, which enter next to them: for the pairs that see each other.
"""

from typing import Any

import triton.language as tl
from torch import Tensor

from subquad.kernels.attention.features.triton.feature_tiles import (
    advanced,
    base_of,
    causal_square,
    diagonal_square,
    dot_as,
    exchanged,
    exponents,
    is_finite,
    is_later,
    not_taken_out,
    numbers,
    of_earlier,
    of_later,
    shift_of,
)
from subquad.kernels.attention.features.triton.reads import ReadIndex
from subquad.kernels.attention.features.triton.states import Side
from subquad.kernels.triton.launch import dot_upcast, kernel, launch, load_rows, padded, slice_of, store_rows, strides
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import tiles_of


def both_sides(name: str, queries: Side, keys: Side, index: ReadIndex) -> dict[str, Any]:
    """The arguments of the kernels of chunks."""
    (_, H, N, D), (_, G, _, E) = queries.rows.shape, keys.payload.shape
    tiles = tiles_of(name, queries.rows.dtype, max(D, E))
    return {
        **queries.arguments("query"),
        **queries.biases("query"),
        **keys.arguments("key"),
        **keys.shifts("key"),
        "value": keys.payload,
        **strides("value", keys.payload),
        **{"H": H, "share": H // G, "N": N, "first": index.first},
        **{"D": D, "C": keys.rows.shape[3], "R": queries.features, "E": E},
        "SLICE": slice_of(queries.rows, 64 if index.unit == 64 else 16),
        "TOKENS": index.unit,
        "FEATURES": tiles.keys,
        **tiles.options(),
        "SIZES": index.unit.bit_length() - 1,  # of squares: 1, 2, 4, …
    }


def read_within_chunks(out: Tensor, lse: Tensor, queries: Side, keys: Side, index: ReadIndex) -> None:
    """Merge into out and lse what the keys of each query's own chunk give."""
    B, H = lse.shape[:2]
    launch(
        read_chunks,
        (index.slots, B * H),
        cost=cost_of(queries, keys, index, 1),
        out=out,
        **strides("out", out),
        lse=lse,
        WIDTH=padded(out.shape[3]),
        **both_sides("read_chunks", queries, keys, index),
    )


def cost_of(queries: Side, keys: Side, index: ReadIndex, times: int) -> LaunchCost:
    """The cost of one launch, in which products of pairs are repeated `times` times."""
    (B, H, N, D), (*_, C), E, R = queries.rows.shape, keys.rows.shape, keys.payload.shape[3], queries.features
    tokens = min(N, index.unit * index.slots)
    made = (0 if queries.projection is None else D) + (0 if keys.projection is None else C)
    pairs = times * index.unit * (R * (index.unit.bit_length() - 1) + E)
    return LaunchCost(B * H * tokens * (R * made + pairs), 4 * B * H * tokens * times * (D + C + 2 * E))


@kernel
def read_chunks(
    query,
    query_b,
    query_h,
    query_n,
    of_query,
    of_query_h,
    query_bias,
    query_bias_h,
    key,
    key_b,
    key_h,
    key_n,
    of_key,
    of_key_h,
    key_shift,
    key_shift_b,
    key_shift_h,
    key_shift_n,
    value,
    value_b,
    value_h,
    value_n,
    out,
    out_b,
    out_h,
    out_n,
    lse,
    H,
    share,
    N,
    first,
    D: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    SLICE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZES: tl.constexpr,
):
    """out and lse, which hold those of the state, with a chunk's keys. Weights are less each query's maximum."""
    KIND: tl.constexpr = value.dtype.element_ty
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    g = h // share
    position = first + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    present = position < N
    query += b * query_b + h * query_h
    of_query = advanced(of_query, h * of_query_h)
    query_bias = advanced(query_bias, h * query_bias_h)
    key += b * key_b + g * key_h
    of_key = advanced(of_key, g * of_key_h)
    out += b * out_b + h * out_h
    shift = shift_of(key_shift, b, g, key_shift_b, key_shift_h, key_shift_n, position, present)
    visible = not_taken_out(shift, present)
    largest = tl.full((TOKENS,), -float("inf"), tl.float32)
    weights = tl.zeros((TOKENS, TOKENS), tl.float32)
    for start in range(0, R, FEATURES):
        x = exponents(
            query, query_n, of_query, query_bias, None, position, present, start, D, R, SLICE, TOKENS, FEATURES
        )
        y = exponents(key, key_n, of_key, None, shift, position, visible, start, C, R, SLICE, TOKENS, FEATURES)
        now = tl.maximum(largest, tl.max(x + y, 1))
        itself = tl.sum(tl.exp(x + y - base_of(now)[:, None]), 1)
        weights = weights * tl.exp(largest - base_of(now))[:, None]
        weights += tl.where(diagonal_square(TOKENS), itself[:, None], 0.0)
        largest = now
        block = y  # the maxima over each `size` tokens
        for step in range(0, SIZES):
            size = 1 << step
            other = exchanged(block, size, TOKENS, FEATURES)
            now = tl.maximum(largest, tl.max(tl.where(is_later(size, TOKENS)[:, None], x + other, -float("inf")), 1))
            later = of_later(x - base_of(now)[:, None], other, size, TOKENS)
            more = dot_as(later, tl.trans(of_earlier(y, block, size, TOKENS)), KIND)
            weights = weights * tl.exp(largest - base_of(now))[:, None]
            weights += tl.where(causal_square(size, TOKENS), more, 0.0)
            largest = now
            block = tl.maximum(block, other)
    total = tl.sum(weights, 1)
    before = tl.load(lse + head * N + position, mask=present, other=-float("inf"))
    base = base_of(tl.maximum(largest, before))
    of_state, of_chunk = tl.exp(before - base), tl.exp(largest - base)
    total = of_state + total * of_chunk
    norm = tl.where(total == 0, 1.0, total)
    tl.store(lse + head * N + position, tl.where(total == 0, -float("inf"), base + tl.log(norm)), mask=present)
    values = load_rows(value + b * value_b + g * value_h, value_n, position, visible, E, WIDTH)
    result = dot_upcast(weights * (of_chunk / norm)[:, None], numbers(values))
    spoilt = tl.cumsum(tl.where(is_finite(values), 0.0, 1.0), 0) > 0
    result = tl.where(spoilt, float("nan"), result)
    result += load_rows(out, out_n, position, present, E, WIDTH) * (of_state / norm)[:, None]
    store_rows(out, out_n, position, present, result, E, WIDTH)
