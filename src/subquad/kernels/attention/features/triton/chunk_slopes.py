"""Gradients of causal attention by features inside a chunk: `chunks` has the formulas."""

import triton.language as tl
from torch import Tensor

from subquad.kernels.attention.features.triton.chunks import both_sides, cost_of
from subquad.kernels.attention.features.triton.feature_tiles import (
    advanced,
    causal_square,
    diagonal_square,
    dot_as,
    exchanged,
    exponents,
    is_finite,
    not_taken_out,
    numbers,
    of_earlier,
    of_later,
    shift_of,
)
from subquad.kernels.attention.features.triton.reads import ReadIndex
from subquad.kernels.attention.features.triton.states import Side
from subquad.kernels.triton.launch import inner, kernel, launch, load_rows, padded, slice_of, store_rows, strides


def slopes_within_chunks(
    of_queries: Tensor, of_keys: Tensor, grad_value: Tensor, queries: Side, keys: Side, index: ReadIndex
) -> None:
    """Fill dx, dy and dv, for each query head's part; queries with −lse, dO and a."""
    B, H = queries.rows.shape[:2]
    inputs = {
        "query_shift": queries.shift,
        "grad": queries.payload,
        **strides("grad", queries.payload),
        "weight": queries.weight,
    }
    launch(
        chunk_slopes,
        (index.slots, B * H),
        cost=cost_of(queries, keys, index, 2),
        of_queries=of_queries,
        of_keys=of_keys,
        slopes_h=of_queries.stride(1),
        OF_E=slice_of(keys.payload, 64),
        **both_sides("chunk_slopes", queries, keys, index),
        **inputs,
    )
    both = both_sides("chunk_values", queries, keys, index)
    launch(
        chunk_values,
        (index.slots, B * H),
        cost=cost_of(queries, keys, index, 1),
        grad_value=grad_value,
        **strides("grad_value", grad_value),
        WIDTH=padded(grad_value.shape[3]),
        **{name: x for name, x in both.items() if not name.startswith("value")},
        **inputs,
    )


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
    position = first + row
    present = position < N
    query += b * query_b + h * query_h
    of_query = advanced(of_query, h * of_query_h)
    query_bias = advanced(query_bias, h * query_bias_h)
    key += b * key_b + g * key_h
    of_key = advanced(of_key, g * of_key_h)
    grad += b * grad_b + h * grad_h
    of_queries += head * slopes_h
    of_keys += head * slopes_h
    shift = shift_of(key_shift, b, g, key_shift_b, key_shift_h, key_shift_n, position, present)
    visible = not_taken_out(shift, present)
    of_lse = tl.load(query_shift + head * N + position, mask=present, other=-float("inf"))
    sees = present & (of_lse != -float("inf"))
    a = tl.load(weight + head * N + position, mask=sees, other=0.0)
    value += b * value_b + g * value_h
    slopes = inner(grad, grad_n, position, sees, value, value_n, position, visible, E, OF_E, KIND)
    slopes += a[:, None]
    token = tl.arange(0, TOKENS)
    allowed = token[:, None] >= token[None, :]
    slopes = tl.where(allowed, slopes, 0.0)
    of_itself = tl.sum(tl.where(diagonal_square(TOKENS), slopes, 0.0), 1)[:, None]
    for start in range(0, R, FEATURES):
        x = exponents(
            query, query_n, of_query, query_bias, of_lse, position, sees, start, D, R, SLICE, TOKENS, FEATURES
        )
        y = exponents(key, key_n, of_key, None, shift, position, visible, start, C, R, SLICE, TOKENS, FEATURES)
        itself = tl.exp(x + y)
        dx = itself * of_itself
        dy = dx
        block = y  # the maxima over each `size` tokens
        for step in range(0, SIZES):
            size = 1 << step
            other = exchanged(block, size, TOKENS, FEATURES)
            later = of_later(x, other, size, TOKENS)
            earlier = of_earlier(y, block, size, TOKENS)
            square = causal_square(size, TOKENS)
            of_square = tl.where(square, slopes, 0.0)
            dx += later * dot_as(of_square, numbers(earlier), KIND)
            dy += earlier * dot_as(tl.trans(of_square), numbers(later), KIND)
            block = tl.maximum(block, other)
        dy = tl.where(visible[:, None], dy, 0.0)  # hidden: no gradient
        store_rows(of_queries + start, R, row, present, dx, R - start, FEATURES)
        store_rows(of_keys + start, R, row, present, dy, R - start, FEATURES)


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
    position = first + row
    present = position < N
    query += b * query_b + h * query_h
    of_query = advanced(of_query, h * of_query_h)
    query_bias = advanced(query_bias, h * query_bias_h)
    key += b * key_b + g * key_h
    of_key = advanced(of_key, g * of_key_h)
    grad += b * grad_b + h * grad_h
    shift = shift_of(key_shift, b, g, key_shift_b, key_shift_h, key_shift_n, position, present)
    visible = not_taken_out(shift, present)
    of_lse = tl.load(query_shift + head * N + position, mask=present, other=-float("inf"))
    sees = present & (of_lse != -float("inf"))
    a = tl.load(weight + head * N + position, mask=sees, other=0.0)
    weights = tl.zeros((TOKENS, TOKENS), tl.float32)
    for start in range(0, R, FEATURES):
        x = exponents(
            query, query_n, of_query, query_bias, of_lse, position, sees, start, D, R, SLICE, TOKENS, FEATURES
        )
        y = exponents(key, key_n, of_key, None, shift, position, visible, start, C, R, SLICE, TOKENS, FEATURES)
        weights += tl.where(diagonal_square(TOKENS), tl.sum(tl.exp(x + y), 1)[:, None], 0.0)
        block = y  # the maxima over each `size` tokens
        for step in range(0, SIZES):
            size = 1 << step
            other = exchanged(block, size, TOKENS, FEATURES)
            later = of_later(x, other, size, TOKENS)
            earlier = of_earlier(y, block, size, TOKENS)
            more = dot_as(later, tl.trans(earlier), KIND)
            weights += tl.where(causal_square(size, TOKENS), more, 0.0)
            block = tl.maximum(block, other)
    token = tl.arange(0, TOKENS)
    allowed = token[:, None] >= token[None, :]
    weights = tl.where(allowed & (sees & ~is_finite(a))[:, None], float("nan"), weights)
    grads = numbers(load_rows(grad, grad_n, position, sees, E, WIDTH).to(tl.float32))
    of_values = tl.where(visible[:, None], dot_as(tl.trans(weights), grads, KIND), 0.0)
    store_rows(grad_value + b * grad_value_b + h * grad_value_h, grad_value_n, position, present, of_values, E, WIDTH)
