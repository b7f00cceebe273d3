"""The forward pass of attention by features on GPUs: queries read a state, and under a causal mask their own chunk.

    out_i = Σ_r e^{x_ir + l_r − lse_i} V_r + Σ_{j ≤ i in the chunk} e^{s_ij − lse_i} v_j,   e^{s_ij} = Σ_r e^{x_ir + y_jr}

A program takes a chunk of a head's queries and walks through the features. It carries an online softmax over the state's
features, and the weights of the chunk's pairs less the maximum of each query, as a square of tokens:

                    features →                   keys of the chunk →
        queries ↓   x + l   ·  V (R,E)           pairs (grown feature by feature)  ·  v
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.parts.features.triton.states import CHUNK, Side, States, features_at_a_time, slice_of
from subquad.ops.parts.features.triton.tiles import (
    base_of,
    dot_as,
    earlier_half,
    exponents,
    is_finite,
    largest_of_squares,
    later_half,
    numbers,
    seen_itself,
    seen_squares,
)
from subquad.ops.triton.launch import dot_wide, launch, load_rows, padded, store_rows, strides, tile
from subquad.ops.triton.recording import Work


def read(out: Tensor, lse: Tensor, queries: Side, keys: Side, states: States, places: tuple[int, int, int], causal: bool) -> None:
    """Fill the rows of out and lse.

    `places` = (first, unit, count): the query at first + s·unit is the first to read slot s, and there are `count` such
    slots. It may be negative: there are no queries there.
    """
    (B, H, N, D), (_, G, M, E), R = queries.rows.shape, keys.payload.shape, queries.features
    first, unit, count = places
    tokens = tile(unit, CHUNK)
    read_products = R * (E + (0 if queries.of is None else D))
    own_products = tokens * (R * squares_of(tokens) + E) if causal else 0
    launch(
        read_states,
        (count * triton.cdiv(unit, tokens), B * H),
        num_warps=4 if E <= 64 and not causal else 8,
        work=Work(B * H * N * (read_products + own_products), 4 * B * H * (N * (D + E) + count * R * E)),
        **queries.arguments("query"),
        **queries.biases("query"),
        **keys.arguments("key"),
        **keys.shifts("key"),
        value=keys.payload,
        **strides("value", keys.payload),
        **states.arguments(),
        out=out,
        **strides("out", out),
        lse=lse,
        H=H,
        share=H // G,
        N=N,
        first=first,
        unit=unit,
        tiles=triton.cdiv(unit, tokens),
        D=D,
        C=keys.rows.shape[3],
        R=R,
        E=E,
        SLICE=slice_of(queries.rows),
        TOKENS=tokens,
        FEATURES=features_at_a_time(queries),
        WIDTH=padded(E),
        SQUARES=squares_of(tokens) if causal else 0,
    )


def squares_of(tokens: int) -> int:
    """How many sizes of squares, 1, 2, 4, …, make the triangle of a chunk."""
    return tokens.bit_length() - 1


@triton.jit
def read_states(
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
    means,
    logs,
    states_head,
    out,
    out_b,
    out_h,
    out_n,
    lse,
    H,
    share,
    N,
    first,
    unit,
    tiles,
    D: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    SLICE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """out and lse of a chunk of queries. SQUARES: sizes of squares in the chunk; 0: they read the state alone."""
    slot, chunk = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    g = h // share
    place = first + slot * unit + chunk * TOKENS + tl.arange(0, TOKENS)
    there = (place >= 0) & (place < tl.minimum(first + (slot + 1) * unit, N))
    query += b * query_b + h * query_h
    key += b * key_b + g * key_h
    value += b * value_b + g * value_h
    state = (b * (H // share) + g) * states_head + slot * R
    if of_query is not None:
        of_query += h * of_query_h
    if query_bias is not None:
        query_bias += h * query_bias_h
    if of_key is not None:
        of_key += g * of_key_h
    shift = None
    visible = there
    if SQUARES > 0:
        if key_shift is not None:
            shifts = key_shift + b * key_shift_b + g * key_shift_h + place.to(tl.int64) * key_shift_n
            shift = tl.load(shifts, mask=there, other=-float("inf"))
            visible = there & (shift != -float("inf"))
    largest = tl.full((TOKENS,), -float("inf"), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    sums = tl.zeros((TOKENS, WIDTH), tl.float32)
    most = tl.full((TOKENS,), -float("inf"), tl.float32)  # of the pairs
    pairs = tl.zeros((TOKENS, TOKENS if SQUARES > 0 else 1), tl.float32)
    for start in range(0, R, FEATURES):
        x = exponents(query, query_n, of_query, query_bias, None, place, there, start, D, R, SLICE, TOKENS, FEATURES)
        feature = start + tl.arange(0, FEATURES)
        logits = x + tl.load(logs + state + feature, mask=feature < R, other=-float("inf"))[None, :]
        now = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp(largest - base_of(now))
        weights = tl.exp(logits - base_of(now)[:, None])
        mean = load_rows(means + state * E, E, feature, feature < R, E, WIDTH)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + dot_as(weights, mean, value.dtype.element_ty)
        largest = now
        if SQUARES > 0:
            y = exponents(key, key_n, of_key, None, shift, place, visible, start, C, R, SLICE, TOKENS, FEATURES)
            pairs, most = _with_itself(pairs, most, x, y, TOKENS)
            for square in tl.static_range(0, SQUARES):
                pairs, most = _with_squares(pairs, most, x, y, 1 << square, TOKENS, FEATURES, value.dtype.element_ty)
    if SQUARES > 0:
        values = load_rows(value, value_n, place, visible, E, WIDTH)
        own = tl.sum(pairs, 1)
        base = base_of(tl.maximum(largest, most))
        of_state, of_own = tl.exp(largest - base), tl.exp(most - base)
        largest = tl.maximum(largest, most)
        total = total * of_state + own * of_own
        norm = tl.where(total == 0, 1.0, total)
        sums = sums * (of_state / norm)[:, None] + dot_wide(pairs * (of_own / norm)[:, None], numbers(values))
        # 0·NaN is NaN, and a later value may not reach an earlier output: what is not finite comes in here.
        spoilt = tl.cumsum(tl.where(is_finite(values), 0.0, 1.0), 0) > 0
        sums = tl.where(spoilt, float("nan"), sums)
    else:
        norm = tl.where(total == 0, 1.0, total)
        sums = sums / norm[:, None]
    store_rows(out + b * out_b + h * out_h, out_n, place, there, sums, E, WIDTH)
    logarithm = tl.where(total == 0, -float("inf"), base_of(largest) + tl.log(norm))
    tl.store(lse + head * N + place, logarithm, mask=there)


@triton.jit
def _with_itself(pairs, most, x, y, TOKENS: tl.constexpr):
    """The pairs with each query's own key, over some more features."""
    logits = x + y
    now = tl.maximum(most, tl.max(logits, 1))
    own = tl.sum(tl.exp(logits - base_of(now)[:, None]), 1)
    pairs = pairs * tl.exp(most - base_of(now))[:, None]
    return pairs + tl.where(seen_itself(TOKENS), own[:, None], 0.0), now


@triton.jit
def _with_squares(
    pairs,
    most,
    x,
    y,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    KIND: tl.constexpr,
):
    """The pairs with those of all squares of one size, over some more features."""
    earlier = earlier_half(y, SIZE, TOKENS)
    largest = largest_of_squares(earlier, SIZE, TOKENS, FEATURES)
    logits = later_half(x + largest, SIZE, TOKENS)
    now = tl.maximum(most, tl.max(logits, 1))
    of_query = tl.exp(logits - base_of(now)[:, None])
    of_key = tl.exp(earlier - base_of(largest))
    more = dot_as(of_query, tl.trans(of_key), KIND)
    pairs = pairs * tl.exp(most - base_of(now))[:, None]
    return pairs + tl.where(seen_squares(SIZE, TOKENS), more, 0.0), now
