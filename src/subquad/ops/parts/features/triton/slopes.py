"""The gradients of attention by features on GPUs, from its output and log-sum-exp.

With a_i = dlse_i − dO_i·O_i, and the states of keys (l, V) and of queries (l′, V′, a′; exponents x_ir − lse_i):

    dx_ir = e^{x_ir − lse_i + l_r} (dO_i·V_r + a_i)   + Σ_j e^{x_ir − lse_i + y_jr} s_ij        s_ij = dO_i·v_j + a_i
    dy_jr = e^{y_jr + l′_r} (v_j·V′_r + a′_r)         + Σ_i e^{x_ir − lse_i + y_jr} s_ij
    dv_j  = Σ_r e^{y_jr + l′_r} V′_r                  + Σ_ir e^{x_ir − lse_i + y_jr} dO_i

The first term is that of a state, the second that of the pairs of a chunk, j ≤ i. Gradients of keys and values are those
of each query head, which the caller sums over the heads that share a key head.

What is not finite in a query reaches no later key's gradient: factors of it that would meet weights of 0 are made 0, and
s_ij and the pair's weight, which are NaN for the pairs that see each other, bring it in.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.parts.features.triton.reads import squares_of
from subquad.ops.parts.features.triton.states import CHUNK, Side, States, slice_of
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
from subquad.ops.triton.launch import dot, launch, load_rows, padded, store_rows, strides, tile
from subquad.ops.triton.recording import Work


def _shared(queries: Side, keys: Side, states: States, places: tuple[int, int, int], causal: bool) -> dict[str, Any]:
    """Arguments of both kernels. `queries` with −lse as shift, dO as payload and a as weight."""
    (_, H, N, D), (_, G, _, C), E = queries.rows.shape, keys.rows.shape, keys.payload.shape[3]
    first, unit, _ = places
    tokens = tile(unit, CHUNK)
    return {
        **queries.arguments("query"),
        **queries.biases("query"),
        "query_shift": queries.shift,
        **keys.arguments("key"),
        **keys.shifts("key"),
        "value": keys.payload,
        **strides("value", keys.payload),
        "grad": queries.payload,
        **strides("grad", queries.payload),
        "weight": queries.weight,
        **states.arguments(),
        "H": H,
        "share": H // G,
        "N": N,
        "first": first,
        "unit": unit,
        "tiles": triton.cdiv(unit, tokens),
        "D": D,
        "C": C,
        "R": queries.features,
        "E": E,
        "SLICE": slice_of(queries.rows),
        "TOKENS": tokens,
        "FEATURES": tile(queries.features, 32),
        "WIDTH": padded(E),
        "SQUARES": squares_of(tokens) if causal else 0,
    }


def slopes_of_queries(grad_query: Tensor, queries: Side, keys: Side, states: States, places: tuple[int, int, int], causal: bool) -> None:
    """Fill the rows of the queries' gradients; `places` as in `read`."""
    arguments = _shared(queries, keys, states, places, causal)
    (B, H, N, D), R, E = queries.rows.shape, queries.features, keys.payload.shape[3]
    products = R * (E + (0 if queries.of is None else 2 * D))
    launch(
        query_slopes,
        (places[2] * arguments["tiles"], B * H),
        num_warps=8,
        work=Work(B * H * N * products, 4 * B * H * (N * (2 * D + E) + places[2] * R * E)),
        grad_query=grad_query,
        **strides("grad_query", grad_query),
        COMPONENTS=padded(D),
        **arguments,
    )


def slopes_of_keys(
    grads: tuple[Tensor, Tensor, Tensor],
    queries: Side,
    keys: Side,
    states: States,
    places: tuple[int, int, int],
    causal: bool,
) -> None:
    """Fill the rows of the gradients of keys, values and key bias, (B,H,M,·), for each query head's part."""
    arguments = _shared(queries, keys, states, places, causal)
    (B, H, _, _), (_, _, M, C), R, E = queries.rows.shape, keys.rows.shape, queries.features, keys.payload.shape[3]
    products = R * (2 * E + (0 if queries.of is None else 2 * C))
    grad_key, grad_value, grad_bias = grads
    launch(
        key_slopes,
        (places[2] * arguments["tiles"], B * H),
        num_warps=8,
        work=Work(B * H * M * products, 4 * B * H * (2 * M * (C + E) + places[2] * R * E)),
        grad_key=grad_key,
        **strides("grad_key", grad_key),
        grad_value=grad_value,
        **strides("grad_value", grad_value),
        grad_bias=grad_bias,
        weights=states.weights,
        M=M,
        COMPONENTS=padded(C),
        **arguments,
    )


@triton.jit
def query_slopes(
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
    means,
    logs,
    states_head,
    grad_query,
    grad_query_b,
    grad_query_h,
    grad_query_n,
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
    COMPONENTS: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """dq of a chunk of queries: dx, or dx·u."""
    KIND: tl.constexpr = value.dtype.element_ty
    slot, chunk = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    g = h // share
    place = first + slot * unit + chunk * TOKENS + tl.arange(0, TOKENS)
    there = (place >= 0) & (place < tl.minimum(first + (slot + 1) * unit, N))
    query += b * query_b + h * query_h
    key += b * key_b + g * key_h
    value += b * value_b + g * value_h
    grad += b * grad_b + h * grad_h
    grad_query += b * grad_query_b + h * grad_query_h
    state = (b * (H // share) + g) * states_head + slot * R
    if of_query is not None:
        of_query += h * of_query_h
    if query_bias is not None:
        query_bias += h * query_bias_h
    if of_key is not None:
        of_key += g * of_key_h
    of_lse = tl.load(query_shift + head * N + place, mask=there, other=-float("inf"))
    sees = there & (of_lse != -float("inf"))
    a = tl.load(weight + head * N + place, mask=sees, other=0.0)
    grads = load_rows(grad, grad_n, place, sees, E, WIDTH)
    shift = None
    visible = there
    slopes_of_pairs = tl.zeros((TOKENS, TOKENS if SQUARES > 0 else 1), tl.float32)
    if SQUARES > 0:
        if key_shift is not None:
            shifts = key_shift + b * key_shift_b + g * key_shift_h + place.to(tl.int64) * key_shift_n
            shift = tl.load(shifts, mask=there, other=-float("inf"))
            visible = there & (shift != -float("inf"))
        slopes_of_pairs = dot(grads, tl.trans(load_rows(value, value_n, place, visible, E, WIDTH))) + a[:, None]
    of_rows = tl.zeros((TOKENS, COMPONENTS if of_query is not None else 1), tl.float32)
    for start in range(0, R, FEATURES):
        x = exponents(query, query_n, of_query, query_bias, of_lse, place, sees, start, D, R, SLICE, TOKENS, FEATURES)
        feature = start + tl.arange(0, FEATURES)
        exists = feature < R
        log = tl.load(logs + state + feature, mask=exists, other=-float("inf"))
        mean = load_rows(means + state * E, E, feature, exists, E, WIDTH)
        slopes = tl.exp(x + log[None, :]) * (dot(grads, tl.trans(mean.to(KIND))) + a[:, None])
        if SQUARES > 0:
            y = exponents(key, key_n, of_key, None, shift, place, visible, start, C, R, SLICE, TOKENS, FEATURES)
            own = tl.sum(tl.where(seen_itself(TOKENS), slopes_of_pairs, 0.0), 1)
            slopes += tl.exp(x + y) * own[:, None]
            for square in tl.static_range(0, SQUARES):
                slopes += _query_slopes_of_squares(slopes_of_pairs, x, y, 1 << square, TOKENS, FEATURES, KIND)
        if of_query is None:
            store_rows(grad_query + start, grad_query_n, place, there, slopes, R - start, FEATURES)
        else:
            of_rows += dot_as(slopes, load_rows(of_query, D, feature, exists, D, COMPONENTS), KIND)
    if of_query is not None:
        store_rows(grad_query, grad_query_n, place, there, of_rows, D, COMPONENTS)


@triton.jit
def _query_slopes_of_squares(
    of_pairs,
    x,
    y,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    KIND: tl.constexpr,
):
    """What the squares of one size add to dx."""
    earlier = earlier_half(y, SIZE, TOKENS)
    largest = largest_of_squares(earlier, SIZE, TOKENS, FEATURES)
    of_query = tl.exp(later_half(x + largest, SIZE, TOKENS))
    of_key = numbers(tl.exp(earlier - base_of(largest)))
    seen = tl.where(seen_squares(SIZE, TOKENS), of_pairs, 0.0)
    return of_query * dot_as(seen, of_key, KIND)


@triton.jit
def key_slopes(
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
    means,
    logs,
    weights,
    states_head,
    grad_key,
    grad_key_b,
    grad_key_h,
    grad_key_n,
    grad_value,
    grad_value_b,
    grad_value_h,
    grad_value_n,
    grad_bias,
    H,
    share,
    N,
    M,
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
    COMPONENTS: tl.constexpr,
    SQUARES: tl.constexpr,
):
    """dk, dv and the slope of the key bias of a chunk of keys, from one query head."""
    KIND: tl.constexpr = value.dtype.element_ty
    slot, chunk = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    g = h // share
    place = first + slot * unit + chunk * TOKENS + tl.arange(0, TOKENS)
    there = (place >= 0) & (place < tl.minimum(first + (slot + 1) * unit, M))
    query += b * query_b + h * query_h
    key += b * key_b + g * key_h
    value += b * value_b + g * value_h
    grad += b * grad_b + h * grad_h
    grad_key += b * grad_key_b + h * grad_key_h
    state = head * states_head + slot * R
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
    values = load_rows(value, value_n, place, visible, E, WIDTH)
    sees = there
    of_lse = tl.zeros((TOKENS,), tl.float32)
    a = tl.zeros((TOKENS,), tl.float32)
    pairs = tl.zeros((TOKENS, TOKENS if SQUARES > 0 else 1), tl.float32)
    slopes_of_pairs = pairs
    grads = values
    if SQUARES > 0:
        of_lse = tl.load(query_shift + head * N + place, mask=there, other=-float("inf"))
        sees = there & (of_lse != -float("inf"))
        a = tl.load(weight + head * N + place, mask=sees, other=0.0)
        grads = load_rows(grad, grad_n, place, sees, E, WIDTH)
        slopes_of_pairs = dot(grads, tl.trans(values)) + a[:, None]
    of_values = tl.zeros((TOKENS, WIDTH), tl.float32)
    of_rows = tl.zeros((TOKENS, COMPONENTS if of_key is not None else 1), tl.float32)
    of_bias = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, R, FEATURES):
        y = exponents(key, key_n, of_key, None, shift, place, visible, start, C, R, SLICE, TOKENS, FEATURES)
        feature = start + tl.arange(0, FEATURES)
        exists = feature < R
        log = tl.load(logs + state + feature, mask=exists, other=-float("inf"))
        a_mean = tl.load(weights + state + feature, mask=exists, other=0.0)
        mean = load_rows(means + state * E, E, feature, exists, E, WIDTH).to(KIND)
        weighed = tl.exp(y + log[None, :])
        of_values += dot_as(weighed, mean, KIND)
        slopes = weighed * (dot(values, tl.trans(mean)) + a_mean[None, :])
        if SQUARES > 0:
            x = exponents(
                query, query_n, of_query, query_bias, of_lse, place, sees, start, D, R, SLICE, TOKENS, FEATURES
            )
            own = tl.sum(tl.where(seen_itself(TOKENS), slopes_of_pairs, 0.0), 1)
            weight_of_own = tl.exp(x + y)
            slopes += weight_of_own * own[:, None]
            pairs += tl.where(seen_itself(TOKENS), tl.sum(weight_of_own, 1)[:, None], 0.0)
            for square in tl.static_range(0, SQUARES):
                more, of_keys = _key_slopes_of_squares(slopes_of_pairs, x, y, 1 << square, TOKENS, FEATURES, KIND)
                pairs += more
                slopes += of_keys
        slopes = tl.where(visible[:, None], slopes, 0.0)  # hidden: no gradient, also where the state is NaN
        of_bias += tl.sum(slopes, 1)
        if of_key is None:
            store_rows(grad_key + start, grad_key_n, place, there, slopes, R - start, FEATURES)
        else:
            of_rows += dot_as(slopes, load_rows(of_key, C, feature, exists, C, COMPONENTS), KIND)
    if SQUARES > 0:
        token = tl.arange(0, TOKENS)
        spoilt = (token[:, None] >= token[None, :]) & (sees & ~is_finite(a))[:, None]
        pairs = tl.where(spoilt, float("nan"), pairs)
        of_values += dot_as(tl.trans(pairs), numbers(grads.to(tl.float32)), KIND)
    of_values = tl.where(visible[:, None], of_values, 0.0)
    store_rows(grad_value + b * grad_value_b + h * grad_value_h, grad_value_n, place, there, of_values, E, WIDTH)
    tl.store(grad_bias + head * M + place, of_bias, mask=there)
    if of_key is not None:
        store_rows(grad_key, grad_key_n, place, there, of_rows, C, COMPONENTS)


@triton.jit
def _key_slopes_of_squares(
    of_pairs,
    x,
    y,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    KIND: tl.constexpr,
):
    """The weights of the squares of one size over some features, and what these squares add to dy."""
    earlier = earlier_half(y, SIZE, TOKENS)
    largest = largest_of_squares(earlier, SIZE, TOKENS, FEATURES)
    of_query = tl.exp(later_half(x + largest, SIZE, TOKENS))
    of_key = tl.exp(earlier - base_of(largest))
    seen = seen_squares(SIZE, TOKENS)
    pairs = tl.where(seen, dot_as(of_query, tl.trans(of_key), KIND), 0.0)
    slopes = dot_as(tl.trans(tl.where(seen, of_pairs, 0.0)), numbers(of_query), KIND)
    return pairs, of_key * slopes
