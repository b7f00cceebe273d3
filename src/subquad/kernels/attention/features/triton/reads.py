"""Queries read the state of the keys before their unit, and the gradients of that, on GPUs.

With a_i = dlse_i − dO_i·O_i, and the states of keys (l, V) and of queries (l′, V′, a′; exponents x_ir − lse_i):

    out_i = Σ_r e^{x_ir + l_r − lse_i} V_r             dx_ir = e^{x_ir − lse_i + l_r} (dO_i·V_r + a_i)
    dv_j  = Σ_r e^{y_jr + l′_r} V′_r                   dy_jr = e^{y_jr + l′_r} (v_j·V′_r + a′_r)

A program takes some tokens of a head and walks through the features. Slopes of exponents, dx and dy, go to buffers,
from which products with the projections make gradients of rows.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.attention.features.triton.feature_tiles import (
    advanced,
    base_of,
    dot_as,
    exponents,
    not_taken_out,
    shift_of,
)
from subquad.kernels.attention.features.triton.states import Side, States
from subquad.kernels.triton.launch import (
    dot_shrunk,
    inner,
    kernel,
    launch,
    load_rows,
    padded,
    slice_of,
    store_rows,
    strides,
    tile,
    unshrunk,
)
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import Tiles, tiles_of

SLICE = 64  # components of a row at a time, at most


class ReadIndex(NamedTuple):
    """The tokens that read each slot: slot s those from first + s·unit on, for this many slots.

    `first` may be negative: there are no tokens before 0.
    """

    first: int
    unit: int
    slots: int

    def programs(self, tiles: Tiles) -> int:
        """The number of programs for a head's tokens."""
        return self.slots * triton.cdiv(self.unit, tile(self.unit, tiles.rows))

    def arguments(self, tiles: Tiles, R: int) -> dict[str, int]:
        """The kernel's arguments for this index, with tiles of tokens and of features."""
        tokens = tile(self.unit, tiles.rows)
        of_unit = {"first": self.first, "unit": self.unit, "tiles": triton.cdiv(self.unit, tokens)}
        return of_unit | tiles.options() | {"TOKENS": tokens, "FEATURES": tile(R, tiles.keys)}


def read(out: Tensor, lse: Tensor, queries: Side, states: States, index: ReadIndex) -> None:
    """Fill the rows of out and lse."""
    (B, H, N, D), E, R = queries.rows.shape, out.shape[3], queries.features
    tiles = tiles_of("read_states", queries.rows.dtype, max(D, E))
    launch(
        read_states,
        (index.programs(tiles), B * H),
        cost=_cost(queries, index, E, 1),
        **queries.arguments("query"),
        **queries.biases("query"),
        **states.arguments(),
        out=out,
        **strides("out", out),
        lse=lse,
        H=H,
        share=B * H // states.logs.shape[0],
        N=N,
        **index.arguments(tiles, R),
        D=D,
        R=R,
        E=E,
        SLICE=slice_of(queries.rows, SLICE),
        WIDTH=padded(E),
    )


def slopes_of_queries(slopes: Tensor, queries: Side, states: States, index: ReadIndex, *, add: bool) -> None:
    """Fill dx of the queries from places.first on, or add to it; queries with −lse, dO and a."""
    (B, H, N, D), E, R = queries.rows.shape, queries.payload.shape[3], queries.features
    tiles = tiles_of("query_slopes", queries.rows.dtype, max(D, E))
    launch(
        query_slopes,
        (index.programs(tiles), B * H),
        cost=_cost(queries, index, E, 1),
        **queries.arguments("query"),
        **queries.biases("query"),
        query_shift=queries.shift,
        grad=queries.payload,
        **strides("grad", queries.payload),
        weight=queries.weight,
        **states.arguments(),
        slopes=slopes,
        slopes_h=slopes.stride(1),
        H=H,
        share=B * H // states.logs.shape[0],
        N=N,
        **index.arguments(tiles, R),
        D=D,
        R=R,
        E=E,
        SLICE=slice_of(queries.rows, SLICE),
        OF_E=slice_of(queries.payload, SLICE),
        ADD=add,
    )


def slopes_of_keys(
    slopes: Tensor, grad_value: Tensor, keys: Side, states: States, index: ReadIndex, *, add: bool
) -> None:
    """Fill dy of the keys from places.first on, and add to dv or fill it, for each query head's part."""
    (B, H, M, E), C, R = grad_value.shape, keys.rows.shape[3], keys.features
    tiles = tiles_of("key_slopes", keys.rows.dtype, max(C, E))
    launch(
        key_slopes,
        (index.programs(tiles), B * H),
        cost=_cost(keys, index, E, 2),
        **keys.arguments("key"),
        **keys.shifts("key"),
        value=keys.payload,
        **strides("value", keys.payload),
        **states.arguments(),
        weights=states.weights,
        slopes=slopes,
        slopes_h=slopes.stride(1),
        grad_value=grad_value,
        **strides("grad_value", grad_value),
        H=H,
        share=H // keys.rows.shape[1],
        M=M,
        **index.arguments(tiles, R),
        D=C,
        R=R,
        E=E,
        SLICE=slice_of(keys.rows, SLICE),
        OF_E=slice_of(keys.payload, SLICE),
        WIDTH=padded(E),
        ADD=add,
    )


def _cost(side: Side, index: ReadIndex, E: int, times: int) -> LaunchCost:
    """The cost of one launch, in which products with the states are repeated `times` times."""
    (B, heads, tokens, D), R = side.rows.shape, side.features
    count = min(tokens, index.unit * index.slots)
    products = count * R * (times * E + (0 if side.projection is None else D))
    return LaunchCost(B * heads * products, 4 * B * heads * (count * (D + E) + index.slots * R * E))


@kernel
def read_states(
    query,
    query_b,
    query_h,
    query_n,
    of_query,
    of_query_h,
    query_bias,
    query_bias_h,
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
    R: tl.constexpr,
    E: tl.constexpr,
    SLICE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """out and lse of some queries: an online softmax over the state's features."""
    KIND: tl.constexpr = query.dtype.element_ty
    slot = tl.program_id(0) // tiles
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    position = first + slot * unit + tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    present = (position >= 0) & (position < tl.minimum(first + (slot + 1) * unit, N))
    query += b * query_b + h * query_h
    of_query = advanced(of_query, h * of_query_h)
    query_bias = advanced(query_bias, h * query_bias_h)
    state = head // share * states_head + slot * R
    largest = tl.full((TOKENS,), -float("inf"), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    sums = tl.zeros((TOKENS, WIDTH), tl.float32)
    for start in range(0, R, FEATURES):
        x = exponents(
            query, query_n, of_query, query_bias, None, position, present, start, D, R, SLICE, TOKENS, FEATURES
        )
        feature = start + tl.arange(0, FEATURES)
        exists = feature < R
        logits = x + tl.load(logs + state + feature, mask=exists, other=-float("inf"))[None, :]
        now = tl.maximum(largest, tl.max(logits, 1))
        shrink = tl.exp(largest - base_of(now))
        weights = tl.exp(logits - base_of(now)[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mean = load_rows(means + state * E, E, feature, exists, E, WIDTH)
        sums = sums * shrink[:, None] + dot_shrunk(weights, mean.to(KIND))
        largest = now
    norm = tl.where(total == 0, 1.0, total)
    result = unshrunk(sums / norm[:, None], query)
    store_rows(out + b * out_b + h * out_h, out_n, position, present, result, E, WIDTH)
    logarithm = tl.where(total == 0, -float("inf"), base_of(largest) + tl.log(norm))
    tl.store(lse + head * N + position, logarithm, mask=present)


@kernel
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
    grad,
    grad_b,
    grad_h,
    grad_n,
    weight,
    means,
    logs,
    states_head,
    slopes,
    slopes_h,
    H,
    share,
    N,
    first,
    unit,
    tiles,
    D: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    SLICE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    OF_E: tl.constexpr,
    ADD: tl.constexpr,
):
    """dx of some queries. The buffer begins with the query at `first`."""
    KIND: tl.constexpr = grad.dtype.element_ty
    slot = tl.program_id(0) // tiles
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    row = slot * unit + tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    position = first + row
    present = (position >= 0) & (row < (slot + 1) * unit) & (position < N)
    query += b * query_b + h * query_h
    of_query = advanced(of_query, h * of_query_h)
    query_bias = advanced(query_bias, h * query_bias_h)
    slopes += head * slopes_h
    state = head // share * states_head + slot * R
    shift = tl.load(query_shift + head * N + position, mask=present, other=-float("inf"))
    sees = present & (shift != -float("inf"))
    a = tl.load(weight + head * N + position, mask=sees, other=0.0)
    grad += b * grad_b + h * grad_h
    for start in range(0, R, FEATURES):
        x = exponents(query, query_n, of_query, query_bias, shift, position, sees, start, D, R, SLICE, TOKENS, FEATURES)
        feature = start + tl.arange(0, FEATURES)
        exists = feature < R
        log = tl.load(logs + state + feature, mask=exists, other=-float("inf"))
        reads = inner(grad, grad_n, position, sees, means + state * E, E, feature, exists, E, OF_E, KIND)
        slope = tl.exp(x + log[None, :]) * (reads + a[:, None])
        if ADD:
            slope += load_rows(slopes + start, R, row, present, R - start, FEATURES)
        store_rows(slopes + start, R, row, present, slope, R - start, FEATURES)


@kernel
def key_slopes(
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
    weights,
    slopes,
    slopes_h,
    grad_value,
    grad_value_b,
    grad_value_h,
    grad_value_n,
    H,
    share,
    M,
    first,
    unit,
    tiles,
    D: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    SLICE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    OF_E: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):
    """dy and dv of some keys, from one query head. The buffer begins with the key at `first`; ADD: to dv."""
    KIND: tl.constexpr = value.dtype.element_ty
    slot = tl.program_id(0) // tiles
    head = tl.program_id(1).to(tl.int64)
    b, h = head // H, head % H
    g = h // share
    row = slot * unit + tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    position = first + row
    present = (position >= 0) & (row < (slot + 1) * unit) & (position < M)
    key += b * key_b + g * key_h
    of_key = advanced(of_key, g * of_key_h)
    slopes += head * slopes_h
    grad_value += b * grad_value_b + h * grad_value_h
    state = head * states_head + slot * R
    shift = shift_of(key_shift, b, g, key_shift_b, key_shift_h, key_shift_n, position, present)
    visible = not_taken_out(shift, present)
    value += b * value_b + g * value_h
    of_values = tl.zeros((TOKENS, WIDTH), tl.float32)
    for start in range(0, R, FEATURES):
        y = exponents(key, key_n, of_key, None, shift, position, visible, start, D, R, SLICE, TOKENS, FEATURES)
        feature = start + tl.arange(0, FEATURES)
        exists = feature < R
        log = tl.load(logs + state + feature, mask=exists, other=-float("inf"))
        a = tl.load(weights + state + feature, mask=exists, other=0.0)
        mean = load_rows(means + state * E, E, feature, exists, E, WIDTH).to(KIND)
        weight = tl.exp(y + log[None, :])
        of_values += dot_as(weight, mean, KIND)
        reads = inner(value, value_n, position, visible, means + state * E, E, feature, exists, E, OF_E, KIND)
        slope = weight * (reads + a[None, :])
        slope = tl.where(visible[:, None], slope, 0.0)  # hidden: no gradient, also where the state is NaN
        store_rows(slopes + start, R, row, present, slope, R - start, FEATURES)
    of_values = tl.where(visible[:, None], of_values, 0.0)
    if ADD:
        of_values += load_rows(grad_value, grad_value_n, position, present, E, WIDTH)
    store_rows(grad_value, grad_value_n, position, present, of_values, E, WIDTH)
