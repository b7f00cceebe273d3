"""Causal attention by features inside a chunk on GPUs, and its gradients.

    w_ij = Σ_r e^{x_ir + y_jr},  j ≤ i            out_i, lse_i: of the state before the chunk and of these
    p_ij = e^{−lse_i} w_ij                        dv_j  = Σ_i p_ij dO_i
    s_ij = dO_i·v_j + a_i                         dx_ir = Σ_j e^{x_ir − lse_i + y_jr} s_ij,   dy_jr: the same over i

A program takes a chunk of a head and walks through the features; the weights of the chunk's pairs, a square of tokens,
grow on the way. `tiles` says how they are stabilised.

No number of a later token may reach an earlier one's results by a weight of 0, since 0·NaN is NaN. So factors that meet
weights of 0 have 0 for what is not finite, which comes in beside them: for the pairs that see each other.
"""

from typing import Any

import triton.language as tl
from torch import Tensor

from subquad.ops.parts.features.triton.reads import Places
from subquad.ops.parts.features.triton.states import Side, slice_of
from subquad.ops.parts.features.triton.tiles import (
    base_of,
    dot_as,
    exchanged,
    exponents,
    inner,
    is_finite,
    is_later,
    numbers,
    of_earlier,
    of_later,
    seen_itself,
    seen_squares,
)
from subquad.ops.triton.launch import dot_wide, kernel, launch, load_rows, padded, store_rows, strides
from subquad.ops.triton.recording import Work


def _both(queries: Side, keys: Side, places: Places) -> dict[str, Any]:
    """Arguments of both kernels."""
    (_, H, N, D), (_, G, _, E) = queries.rows.shape, keys.payload.shape
    return {
        **queries.arguments("query"),
        **queries.biases("query"),
        **keys.arguments("key"),
        **keys.shifts("key"),
        "value": keys.payload,
        **strides("value", keys.payload),
        **{"H": H, "share": H // G, "N": N, "first": places.first},
        **{"D": D, "C": keys.rows.shape[3], "R": queries.features, "E": E},
        "SLICE": min(slice_of(queries.rows), 64 if places.unit == 64 else 16),
        "TOKENS": places.unit,
        "FEATURES": FEATURES,
        "SIZES": places.unit.bit_length() - 1,  # of squares: 1, 2, 4, …
    }


def read_own(out: Tensor, lse: Tensor, queries: Side, keys: Side, places: Places) -> None:
    """Merge into out and lse what the keys of each query's own chunk give."""
    B, H = lse.shape[:2]
    launch(
        read_chunks,
        (places.slots, B * H),
        num_warps=_warps(places),
        work=_work(queries, keys, places, 1),
        out=out,
        **strides("out", out),
        lse=lse,
        WIDTH=padded(out.shape[3]),
        **_both(queries, keys, places),
    )


def slopes_of_own(
    of_queries: Tensor, of_keys: Tensor, grad_value: Tensor, queries: Side, keys: Side, places: Places
) -> None:
    """Fill dx, dy and dv, for each query head's part; queries with −lse, dO and a."""
    B, H = queries.rows.shape[:2]
    both = _both(queries, keys, places) | {
        "query_shift": queries.shift,
        "grad": queries.payload,
        **strides("grad", queries.payload),
        "weight": queries.weight,
    }
    launch(
        chunk_slopes,
        (places.slots, B * H),
        num_warps=_warps(places),
        work=_work(queries, keys, places, 2),
        of_queries=of_queries,
        of_keys=of_keys,
        slopes_h=of_queries.stride(1),
        OF_E=slice_of(keys.payload),
        **both,
    )
    arguments = {name: x for name, x in both.items() if not name.startswith("value")}
    launch(
        chunk_values,
        (places.slots, B * H),
        num_warps=_warps(places),
        work=_work(queries, keys, places, 1),
        grad_value=grad_value,
        **strides("grad_value", grad_value),
        WIDTH=padded(grad_value.shape[3]),
        **arguments,
    )


def _work(queries: Side, keys: Side, places: Places, times: int) -> Work:
    """What one launch does, in which products of pairs come this often."""
    (B, H, N, D), (*_, C), E, R = queries.rows.shape, keys.rows.shape, keys.payload.shape[3], queries.features
    tokens = min(N, places.unit * places.slots)
    made = (0 if queries.of is None else D) + (0 if keys.of is None else C)
    pairs = times * places.unit * (R * (places.unit.bit_length() - 1) + E)
    return Work(B * H * tokens * (R * made + pairs), 4 * B * H * tokens * times * (D + C + 2 * E))


FEATURES = 16


def _warps(places: Places) -> int:
    return 8 if places.unit == 64 else 4


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
    place = first + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = place < N
    query += b * query_b + h * query_h
    key += b * key_b + g * key_h
    out += b * out_b + h * out_h
    if of_query is not None:
        of_query += h * of_query_h
    if query_bias is not None:
        query_bias += h * query_bias_h
    if of_key is not None:
        of_key += g * of_key_h
    shift = None
    visible = there
    if key_shift is not None:
        shifts = key_shift + b * key_shift_b + g * key_shift_h + place.to(tl.int64) * key_shift_n
        shift = tl.load(shifts, mask=there, other=-float("inf"))
        visible = there & (shift != -float("inf"))
    largest = tl.full((TOKENS,), -float("inf"), tl.float32)
    weights = tl.zeros((TOKENS, TOKENS), tl.float32)
    for start in range(0, R, FEATURES):
        x = exponents(query, query_n, of_query, query_bias, None, place, there, start, D, R, SLICE, TOKENS, FEATURES)
        y = exponents(key, key_n, of_key, None, shift, place, visible, start, C, R, SLICE, TOKENS, FEATURES)
        now = tl.maximum(largest, tl.max(x + y, 1))
        itself = tl.sum(tl.exp(x + y - base_of(now)[:, None]), 1)
        weights = weights * tl.exp(largest - base_of(now))[:, None]
        weights += tl.where(seen_itself(TOKENS), itself[:, None], 0.0)
        largest = now
        block = y  # the maxima over each `size` tokens
        for step in range(0, SIZES):
            size = 1 << step
            other = exchanged(block, size, TOKENS, FEATURES)
            now = tl.maximum(largest, tl.max(tl.where(is_later(size, TOKENS)[:, None], x + other, -float("inf")), 1))
            later = of_later(x - base_of(now)[:, None], other, size, TOKENS)
            more = dot_as(later, tl.trans(of_earlier(y, block, size, TOKENS)), KIND)
            weights = weights * tl.exp(largest - base_of(now))[:, None]
            weights += tl.where(seen_squares(size, TOKENS), more, 0.0)
            largest = now
            block = tl.maximum(block, other)
    total = tl.sum(weights, 1)
    before = tl.load(lse + head * N + place, mask=there, other=-float("inf"))
    base = base_of(tl.maximum(largest, before))
    of_state, of_own = tl.exp(before - base), tl.exp(largest - base)
    total = of_state + total * of_own
    norm = tl.where(total == 0, 1.0, total)
    tl.store(lse + head * N + place, tl.where(total == 0, -float("inf"), base + tl.log(norm)), mask=there)
    values = load_rows(value + b * value_b + g * value_h, value_n, place, visible, E, WIDTH)
    result = dot_wide(weights * (of_own / norm)[:, None], numbers(values))
    spoilt = tl.cumsum(tl.where(is_finite(values), 0.0, 1.0), 0) > 0
    result = tl.where(spoilt, float("nan"), result)
    result += load_rows(out, out_n, place, there, E, WIDTH) * (of_state / norm)[:, None]
    store_rows(out, out_n, place, there, result, E, WIDTH)


@kernel
def chunk_slopes(
    query,
    query_b,
    query_h,
    query_n,
    of_query,
    of_query_h,
    query_bias,
    query_bias_h,
    query_shift,
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
    grad,
    grad_b,
    grad_h,
    grad_n,
    weight,
    of_queries,
    of_keys,
    slopes_h,
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
    OF_E: tl.constexpr,
    SIZES: tl.constexpr,
):
    """dx and dy of a chunk's pairs, of one query head. Their buffers begin with the token at `first`."""
    KIND: tl.constexpr = value.dtype.element_ty
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    g = h // share
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = first + row
    there = place < N
    query += b * query_b + h * query_h
    key += b * key_b + g * key_h
    grad += b * grad_b + h * grad_h
    of_queries += head * slopes_h
    of_keys += head * slopes_h
    if of_query is not None:
        of_query += h * of_query_h
    if query_bias is not None:
        query_bias += h * query_bias_h
    if of_key is not None:
        of_key += g * of_key_h
    shift = None
    visible = there
    if key_shift is not None:
        shifts = key_shift + b * key_shift_b + g * key_shift_h + place.to(tl.int64) * key_shift_n
        shift = tl.load(shifts, mask=there, other=-float("inf"))
        visible = there & (shift != -float("inf"))
    of_lse = tl.load(query_shift + head * N + place, mask=there, other=-float("inf"))
    sees = there & (of_lse != -float("inf"))
    a = tl.load(weight + head * N + place, mask=sees, other=0.0)
    value += b * value_b + g * value_h
    slopes = inner(grad, grad_n, place, sees, value, value_n, place, visible, E, OF_E, TOKENS, TOKENS, KIND)
    slopes += a[:, None]
    token = tl.arange(0, TOKENS)
    seen = token[:, None] >= token[None, :]
    slopes = tl.where(seen, slopes, 0.0)
    of_itself = tl.sum(tl.where(seen_itself(TOKENS), slopes, 0.0), 1)[:, None]
    for start in range(0, R, FEATURES):
        x = exponents(query, query_n, of_query, query_bias, of_lse, place, sees, start, D, R, SLICE, TOKENS, FEATURES)
        y = exponents(key, key_n, of_key, None, shift, place, visible, start, C, R, SLICE, TOKENS, FEATURES)
        itself = tl.exp(x + y)
        dx = itself * of_itself
        dy = dx
        block = y  # the maxima over each `size` tokens
        for step in range(0, SIZES):
            size = 1 << step
            other = exchanged(block, size, TOKENS, FEATURES)
            later = of_later(x, other, size, TOKENS)
            earlier = of_earlier(y, block, size, TOKENS)
            square = seen_squares(size, TOKENS)
            of_square = tl.where(square, slopes, 0.0)
            dx += later * dot_as(of_square, numbers(earlier), KIND)
            dy += earlier * dot_as(tl.trans(of_square), numbers(later), KIND)
            block = tl.maximum(block, other)
        dy = tl.where(visible[:, None], dy, 0.0)  # hidden: no gradient
        store_rows(of_queries + start, R, row, there, dx, R - start, FEATURES)
        store_rows(of_keys + start, R, row, there, dy, R - start, FEATURES)


@kernel
def chunk_values(
    query,
    query_b,
    query_h,
    query_n,
    of_query,
    of_query_h,
    query_bias,
    query_bias_h,
    query_shift,
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
    grad,
    grad_b,
    grad_h,
    grad_n,
    weight,
    grad_value,
    grad_value_b,
    grad_value_h,
    grad_value_n,
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
    """dv of a chunk's keys, of one query head."""
    KIND: tl.constexpr = grad.dtype.element_ty
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    g = h // share
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = first + row
    there = place < N
    query += b * query_b + h * query_h
    key += b * key_b + g * key_h
    grad += b * grad_b + h * grad_h
    if of_query is not None:
        of_query += h * of_query_h
    if query_bias is not None:
        query_bias += h * query_bias_h
    if of_key is not None:
        of_key += g * of_key_h
    shift = None
    visible = there
    if key_shift is not None:
        shifts = key_shift + b * key_shift_b + g * key_shift_h + place.to(tl.int64) * key_shift_n
        shift = tl.load(shifts, mask=there, other=-float("inf"))
        visible = there & (shift != -float("inf"))
    of_lse = tl.load(query_shift + head * N + place, mask=there, other=-float("inf"))
    sees = there & (of_lse != -float("inf"))
    a = tl.load(weight + head * N + place, mask=sees, other=0.0)
    weights = tl.zeros((TOKENS, TOKENS), tl.float32)
    for start in range(0, R, FEATURES):
        x = exponents(query, query_n, of_query, query_bias, of_lse, place, sees, start, D, R, SLICE, TOKENS, FEATURES)
        y = exponents(key, key_n, of_key, None, shift, place, visible, start, C, R, SLICE, TOKENS, FEATURES)
        weights += tl.where(seen_itself(TOKENS), tl.sum(tl.exp(x + y), 1)[:, None], 0.0)
        block = y  # the maxima over each `size` tokens
        for step in range(0, SIZES):
            size = 1 << step
            other = exchanged(block, size, TOKENS, FEATURES)
            later = of_later(x, other, size, TOKENS)
            earlier = of_earlier(y, block, size, TOKENS)
            more = dot_as(later, tl.trans(earlier), KIND)
            weights += tl.where(seen_squares(size, TOKENS), more, 0.0)
            block = tl.maximum(block, other)
    token = tl.arange(0, TOKENS)
    seen = token[:, None] >= token[None, :]
    weights = tl.where(seen & (sees & ~is_finite(a))[:, None], float("nan"), weights)
    grads = numbers(load_rows(grad, grad_n, place, sees, E, WIDTH).to(tl.float32))
    of_values = tl.where(visible[:, None], dot_as(tl.trans(weights), grads, KIND), 0.0)
    store_rows(grad_value + b * grad_value_b + h * grad_value_h, grad_value_n, place, there, of_values, E, WIDTH)
