"""States of attention by features on GPUs.

For each feature, what keys and values leave behind is softmax attention of the feature to them:

    l_r = ln Σ_j e^{y_jr},   V_r = Σ_j e^{y_jr − l_r} v_j

And a query's attention by features is softmax attention to R features: out_i = Σ_r e^{x_ir + l_r − lse_i} V_r. So
states merge as partials do, are means that do not overflow, and nothing is ever divided by a small number.

Backwards, queries leave a state to the keys before them, with exponents x_ir − lse_i, dO_i for values, and the mean of
another number a_i too. The sequence is cut into units, whose states are made side by side (`sum_chunks`), and then each
becomes that of all units before it, or behind it (`scan`):

    slot                0       1       2       3
    sum_chunks         [ 0 ]   [ 1 ]   [ 2 ]
    scan                –     [ 0 ]   [0 1]   [0 1 2]     the last is what the next segment of the sequence starts from
    scan, reversed   [1 2]    [ 2 ]     –     [0 1 2]
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.attention.features.triton.feature_tiles import (
    advanced,
    base_of,
    exponents,
    not_taken_out,
    shift_of,
)
from subquad.kernels.triton.launch import (
    dot_shrunk,
    kernel,
    launch,
    load_rows,
    padded,
    rows,
    slice_of,
    store_rows,
    strides,
    tile,
    unshrunk,
)
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import tiles_of

CHUNK, CHUNK_OF_UPCAST = 64, 32  # tokens that a program holds; the three parts of fp32 numbers take more registers
SEGMENT = 4096  # tokens whose units' states exist at a time, where each has its own
LEAST_UNIT, MOST_CHUNKS = 512, 32  # where all tokens make one state


@dataclass(frozen=True)
class Side:
    """Queries, or keys, with what makes exponents of them, and what they leave in a state.

    Attributes:
        rows: (B,heads,tokens,D).
        projection: (1 or heads,R,D), or None: the rows are exponents.
        bias: (1 or heads,R) added to each exponent, or None.
        shift: (B,1 or heads,tokens) added to all exponents of a token, or None; −∞ takes it out.
        payload: (B,heads,tokens,E), of which a state has the means.
        weight: (B,heads,tokens), of which a state has the means too, or None.
    """

    rows: Tensor
    projection: Tensor | None
    bias: Tensor | None
    shift: Tensor | None
    payload: Tensor
    weight: Tensor | None = None

    @staticmethod
    def made(
        rows_: Tensor, projection: Tensor | None, bias: Tensor | None, shift: Tensor | None, payload: Tensor
    ) -> "Side":
        """The side, laid out as kernels read it."""
        projection, bias = (None if x is None else x.float().contiguous() for x in (projection, bias))
        shift = None if shift is None else shift.float().expand(-1, rows_.shape[1], -1)
        return Side(rows(rows_), projection, bias, shift, rows(payload))

    def weighed(self, shift: Tensor, payload: Tensor, weight: Tensor) -> "Side":
        """The side with another payload."""
        return replace(self, shift=shift, payload=rows(payload), weight=weight)

    @property
    def features(self) -> int:
        """R."""
        return self.rows.shape[3] if self.projection is None else self.projection.shape[1]

    def arguments(self, name: str) -> dict[str, Any]:
        """The rows and their projection as arguments of a kernel that calls them so."""
        return {
            name: self.rows,
            **strides(name, self.rows),
            f"of_{name}": self.projection,
            f"of_{name}_h": _between_heads(self.projection),
        }

    def biases(self, name: str) -> dict[str, Any]:
        """The bias, likewise."""
        return {f"{name}_bias": self.bias, f"{name}_bias_h": _between_heads(self.bias)}

    def shifts(self, name: str) -> dict[str, Any]:
        """The shift, likewise."""
        name = f"{name}_shift"
        steps = {f"{name}_{axis}": 0 for axis in "bhn"} if self.shift is None else strides(name, self.shift)
        return {name: self.shift, **steps}


def _between_heads(x: Tensor | None) -> int:
    return 0 if x is None or x.shape[0] == 1 else x.stride(0)


@dataclass(frozen=True)
class States:
    """States of (B·heads, slots).

    Attributes:
        means: (…,R,E) V.
        logs: (…,R) l; −∞ for a feature that no token has.
        weights: (…,R) the means of a, or None.
    """

    means: Tensor
    logs: Tensor
    weights: Tensor | None

    @staticmethod
    def none(side: Side, slots: int) -> "States":
        """Space for this many, and behind them the state of no token."""
        B, heads, _, E = side.payload.shape
        new = side.rows.new_empty(B * heads, slots + 1, side.features, E, dtype=torch.float32)
        states = States(
            new, new.new_empty(new.shape[:3]), None if side.weight is None else new.new_empty(new.shape[:3])
        )
        new[:, slots] = 0.0
        states.logs[:, slots] = -torch.inf
        if states.weights is not None:
            states.weights[:, slots] = 0.0
        return states

    @property
    def slots(self) -> int:
        """The number of slots, less the last."""
        return self.logs.shape[1] - 1

    def last(self) -> "States":
        """The state of all units so far alone."""
        weights = None if self.weights is None else self.weights[:, self.slots :]
        return States(self.means[:, self.slots :], self.logs[:, self.slots :], weights)

    def arguments(self) -> dict[str, Any]:
        """The arguments of a kernel that reads the states."""
        return {
            "means": self.means,
            "logs": self.logs,
            "states_head": self.logs.stride(0),
        }


def chunk_of(x: Tensor) -> int:
    """Tokens that a program holds, at most, of rows of this dtype."""
    return CHUNK_OF_UPCAST if x.dtype == torch.float32 else CHUNK


def update(states: States, side: Side, first: int, unit: int, *, reverse: bool) -> None:
    """Make the states of `slots` units from number `first` on, and merge each with the last state and those before."""
    (B, heads, tokens, D), E, R = side.rows.shape, side.payload.shape[3], side.features
    slots = states.slots
    fresh = states.logs.new_empty(B * heads, slots, R)
    tiles = tiles_of("sum_chunks", side.rows.dtype, max(D, E))
    features, count = tile(R, tiles.keys), min(tokens, slots * unit)
    launch(
        sum_chunks,
        (slots * triton.cdiv(R, features), B * heads),
        **tiles.options(),
        cost=LaunchCost(
            B * heads * count * R * (E + (0 if side.projection is None else D)),
            B * heads * (count * (D + E) + slots * R * E) * 4,
        ),
        **side.arguments("token"),
        **side.biases("token"),
        **side.shifts("token"),
        payload=side.payload,
        **strides("payload", side.payload),
        weight=side.weight,
        means=states.means,
        logs=fresh,
        weights=states.weights,
        heads=heads,
        tokens=tokens,
        slots=slots,
        begin=first * unit,
        unit=unit,
        D=D,
        R=R,
        E=E,
        SLICE=slice_of(side.rows, 16 if side.payload.dtype == torch.float32 else 64),
        TOKENS=tile(unit, tiles.rows),
        FEATURES=features,
        WIDTH=padded(E),
    )
    launch(
        scan,
        (triton.cdiv(R, SCANNED), B * heads),
        num_warps=8,
        cost=LaunchCost(0, 2 * B * heads * slots * R * E * 4),
        fresh=fresh,
        means=states.means,
        logs=states.logs,
        weights=states.weights,
        slots=slots,
        R=R,
        E=E,
        FEATURES=SCANNED,
        WIDTH=padded(E),
        REVERSE=reverse,
    )


def state_of_all(side: Side) -> States:
    """The state of all tokens."""
    tokens = side.rows.shape[2]
    unit = max(LEAST_UNIT, triton.cdiv(tokens, MOST_CHUNKS * CHUNK) * CHUNK)
    states = States.none(side, triton.cdiv(tokens, unit))
    if states.slots:
        update(states, side, 0, unit, reverse=False)
    return states.last()


SCANNED = 16  # features of a program that merges states


@kernel
def sum_chunks(
    token,
    token_b,
    token_h,
    token_n,
    of_token,
    of_token_h,
    token_bias,
    token_bias_h,
    token_shift,
    token_shift_b,
    token_shift_h,
    token_shift_n,
    payload,
    payload_b,
    payload_h,
    payload_n,
    weight,
    means,
    logs,
    weights,
    heads,
    tokens,
    slots,
    begin,
    unit,
    D: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    SLICE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """l_r, V_r and the mean of a, of one unit's tokens. One program takes one tile of a slot's features."""
    TILES: tl.constexpr = (R + FEATURES - 1) // FEATURES
    slot = tl.program_id(0) // TILES
    first = tl.program_id(0) % TILES * FEATURES
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    token += b * token_b + h * token_h
    of_token = advanced(of_token, h * of_token_h)
    token_bias = advanced(token_bias, h * token_bias_h)
    payload += b * payload_b + h * payload_h
    largest = tl.full((FEATURES,), -float("inf"), tl.float32)
    total = tl.zeros((FEATURES,), tl.float32)
    of_weight = tl.zeros((FEATURES,), tl.float32)
    sums = tl.zeros((FEATURES, WIDTH), tl.float32)
    begin += slot * unit
    end = tl.minimum(begin + unit, tokens)
    for start in range(begin, end, TOKENS):
        position = start + tl.arange(0, TOKENS)
        shift = shift_of(token_shift, b, h, token_shift_b, token_shift_h, token_shift_n, position, position < end)
        present = not_taken_out(shift, position < end)
        y = exponents(
            token, token_n, of_token, token_bias, shift, position, present, first, D, R, SLICE, TOKENS, FEATURES
        )
        now = tl.maximum(largest, tl.max(y, 0))
        shrink = tl.exp(largest - base_of(now))
        feature = tl.exp(y - base_of(now)[None, :])
        total = total * shrink + tl.sum(feature, 0)
        if weight is not None:
            a = tl.load(weight + head * tokens + position, mask=present, other=0.0)
            of_weight = of_weight * shrink + tl.sum(feature * a[:, None], 0)
        sums = sums * shrink[:, None] + dot_shrunk(
            tl.trans(feature), load_rows(payload, payload_n, position, present, E, WIDTH)
        )
        largest = now
    some = tl.where(total == 0, 1.0, total)
    feature = first + tl.arange(0, FEATURES)
    of_slot = (head * (slots + 1) + slot) * R
    tl.store(
        logs + (head * slots + slot) * R + feature,
        tl.where(total == 0, -float("inf"), largest + tl.log(some)),
        mask=feature < R,
    )
    result = unshrunk(sums / some[:, None], payload)
    store_rows(means + of_slot * E, E, feature, feature < R, result, E, WIDTH)
    if weight is not None:
        tl.store(weights + of_slot + feature, of_weight / some, mask=feature < R)


@kernel
def scan(
    fresh,
    means,
    logs,
    weights,
    slots,
    R: tl.constexpr,
    E: tl.constexpr,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Each slot's state to that of the slots before it and of the last slot; that to the state of all.

    One program takes some features of a head. `fresh` holds l of the slots.
    """
    head = tl.program_id(1).to(tl.int64)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    exists = feature < R
    last = (head * (slots + 1) + slots) * R
    mean = load_rows(means + last * E, E, feature, exists, E, WIDTH)
    log = tl.load(logs + last + feature, mask=exists, other=-float("inf"))
    of_weight = tl.zeros((FEATURES,), tl.float32)
    if weights is not None:
        of_weight = tl.load(weights + last + feature, mask=exists, other=0.0)
    for step in range(0, slots):
        slot = slots - 1 - step if REVERSE else step
        at = (head * (slots + 1) + slot) * R
        more = load_rows(means + at * E, E, feature, exists, E, WIDTH)
        of_more = tl.load(fresh + (head * slots + slot) * R + feature, mask=exists, other=-float("inf"))
        store_rows(means + at * E, E, feature, exists, mean, E, WIDTH)
        tl.store(logs + at + feature, log, mask=exists)
        largest = base_of(tl.maximum(log, of_more))
        a, b = tl.exp(log - largest), tl.exp(of_more - largest)
        total = tl.where(a + b == 0, 1.0, a + b)
        log = tl.where(a + b == 0, -float("inf"), largest + tl.log(total))
        a, b = a / total, b / total
        mean = mean * a[:, None] + more * b[:, None]
        if weights is not None:
            of_more_weight = tl.load(weights + at + feature, mask=exists, other=0.0)
            tl.store(weights + at + feature, of_weight, mask=exists)
            of_weight = of_weight * a + of_more_weight * b
    store_rows(means + last * E, E, feature, exists, mean, E, WIDTH)
    tl.store(logs + last + feature, log, mask=exists)
    if weights is not None:
        tl.store(weights + last + feature, of_weight, mask=exists)
