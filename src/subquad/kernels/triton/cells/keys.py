"""The gradients of keys and values: a program takes a block of keys of one cell, and goes through all clusters."""

from typing import Any

import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.cells.pair_weights import listed_inside, weight_gradients
from subquad.kernels.triton.group_blocks import group_blocks
from subquad.kernels.triton.launch import (
    dot_upcast,
    inner_of,
    kernel,
    launch,
    load_positions,
    load_rows,
    of_head,
    slice_of,
    store_rows,
    strides,
)
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import tiles_of

Slots = tuple[Tensor, Tensor, Tensor, Tensor]


def differentiate_keys(
    common: dict[str, Any],
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    slots: Slots | None,
    outputs: tuple[Tensor, Tensor],
) -> None:
    """Fill the gradients of keys and values; `common` is what both kernels read, `slots` as in `cells_backward`."""
    (_, H, C, D), (B, G, M, E), (grad_key, grad_value) = common["centroids"].shape, value.shape, outputs
    tiles = tiles_of("cells_to_keys", key.dtype, max(D, E))
    blocks = group_blocks(offsets, M, tiles.keys)
    slot_keys, slot_values, slot_rows, slot_offsets = slots or (None,) * 4
    launch(
        cells_to_keys,
        (blocks.count, B * G),
        cost=LaunchCost(B * H * C * M * (4 * D + 2 * E), 2 * B * G * M * (D + E) * key.element_size()),
        cell=blocks.group,
        start=blocks.start,
        stop=blocks.stop,
        blocks=blocks.count,
        slot_keys=slot_keys,
        slot_values=slot_values,
        slot_rows=slot_rows,
        slot_offsets=slot_offsets,
        slots=0 if slot_rows is None else slot_rows.shape[2],
        grad_key=grad_key.zero_(),  # keys in no cell are in no block
        grad_value=grad_value.zero_(),
        **strides("grad_key", grad_key),
        **strides("grad_value", grad_value),
        **common,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        SLICE=slice_of(key),
        **tiles.options(),
    )


@kernel
def cells_to_keys(
    centroids,
    key,
    value,
    key_b,
    key_h,
    key_n,
    value_b,
    value_h,
    value_n,
    order,
    inside,
    words,
    shift,
    cell_keys,
    cell_values,
    constant,
    of_inside,
    cell,
    start,
    stop,
    blocks,
    slot_keys,
    slot_values,
    slot_rows,
    slot_offsets,
    slots,
    grad_key,
    grad_value,
    grad_key_b,
    grad_key_h,
    grad_key_n,
    grad_value_b,
    grad_value_h,
    grad_value_n,
    scale,
    H,
    G,
    M,
    C,
    X,
    D,
    E,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """The gradients of a block of one cell's keys and values: from all clusters of the heads that share them."""
    of_key, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    x = tl.load(cell + of_key * blocks + block)
    position = tl.load(start + of_key * blocks + block) + tl.arange(0, KEYS)
    token, present = load_positions(order + of_key * M, position, tl.load(stop + of_key * blocks + block))
    b, g, per = of_key // G, of_key % G, H // G
    key, value = of_head(key, of_key, G, key_b, key_h), of_head(value, of_key, G, value_b, value_h)
    k = load_rows(key, key_n, token, present, D, WIDTH)
    v = load_rows(value, value_n, token, present, E, VALUES)
    keyed, valued = (k, key, key_n, token, present), (v, value, value_n, token, present)
    keys = tl.zeros((KEYS, WIDTH), tl.float32)
    values = tl.zeros((KEYS, VALUES), tl.float32)
    if x < X:
        for unit in range(0, per * tl.cdiv(C, ROWS)):  # the heads that share the keys, and tiles of their clusters
            head = b * H + g * per + unit // tl.cdiv(C, ROWS)
            row = unit % tl.cdiv(C, ROWS) * ROWS + tl.arange(0, ROWS)
            of_row, in_row = (head * C + row) * X + x, row < C
            of_means, of_values = centroids + head * C * D, cell_values + (head * C * X + x) * E
            means = load_rows(of_means, D, row, in_row, D, WIDTH).to(k.dtype)
            grad_values = load_rows(of_values, X * E, row, in_row, E, VALUES).to(k.dtype)
            lse = tl.load(shift + of_row, mask=in_row, other=float("-inf"))
            added = tl.load(constant + of_row, mask=in_row, other=0.0)
            allowed = present[None, :] & (lse != float("-inf"))[:, None]
            hidden = allowed & False
            if inside is not None:
                hidden = listed_inside(inside, words, head, C, row, position, present)
            of_listed = None
            if of_inside is not None:
                of_listed = tl.load(of_inside + head * C + row, mask=in_row, other=0.0)[:, None]
            logits = inner_of(means, of_means, D, row, in_row, *keyed, D, SLICE) * scale
            logits = tl.where(allowed, logits - lse[:, None], float("-inf"))
            vs = inner_of(grad_values, of_values, X * E, row, in_row, *valued, E, SLICE)
            ks = 0.0
            if cell_keys is not None:
                of_keys = cell_keys + (head * C * X + x) * D
                grad_keys = load_rows(of_keys, X * D, row, in_row, D, WIDTH).to(k.dtype)
                ks = inner_of(grad_keys, of_keys, X * D, row, in_row, *keyed, D, SLICE)
            weights, of_logits = weight_gradients(tl.exp(logits), ks, vs, added[:, None], allowed, hidden, of_listed)
            keys += dot_upcast(tl.trans(of_logits), means) * scale
            if cell_keys is not None:
                keys += dot_upcast(tl.trans(weights), grad_keys)
            values += dot_upcast(tl.trans(weights), grad_values)
    if slot_rows is not None:  # what these keys got as listed ones, in the order of their slots
        begin = tl.load(slot_offsets + of_key * (M + 1) + token, mask=present, other=0)
        count = tl.load(slot_offsets + of_key * (M + 1) + token + 1, mask=present, other=0) - begin
        count = tl.where(present, count, 0)
        for step in range(0, tl.max(count, 0)):
            listed = step < count
            slot = tl.load(slot_rows + of_key * slots + begin + step, mask=listed, other=0)
            keys += load_rows(slot_keys + of_key * slots * D, D, slot, listed, D, WIDTH)
            values += load_rows(slot_values + of_key * slots * E, E, slot, listed, E, VALUES)
    grad_key = of_head(grad_key, of_key, G, grad_key_b, grad_key_h)
    grad_value = of_head(grad_value, of_key, G, grad_value_b, grad_value_h)
    store_rows(grad_key, grad_key_n, token, present, keys, D, WIDTH)
    store_rows(grad_value, grad_value_n, token, present, values, E, VALUES)
