"""Cells of keys as clusters of queries see them, and the gradient through that.

For the mean query q̄ of a cluster, and those keys of a cell that are not `inside` the cluster's own list:

    u_j = scale·q̄·k_j,   λ = ln Σ_j e^{u_j},   w_j = e^{u_j − λ},   k̄ = Σ_j w_j k_j,   v̄ = Σ_j w_j v_j

The gradients of k̄, v̄ and λ come in as three numbers per cell: ∂L/∂u_j = w_j (dk̄·k_j + dv̄·v_j + c). With c = dλ −
dk̄·k̄ − dv̄·v̄ that is the derivative of the equations above.

    order      [ keys of cell 0 │ cell 1 │ … ]        keys lie sorted by cell
    inside     a bit for each cluster and each place in that order, in words of 32
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.triton.blocks import group_blocks
from subquad.ops.triton.launch import (
    dot,
    dot_wide,
    launch,
    load_rows,
    padded,
    rows,
    seen_exponentials,
    store_rows,
    strides,
)
from subquad.ops.triton.recording import Work
from subquad.ops.triton.tiles import tiles_of


def see_cells(
    centroids: Tensor,
    key: Tensor,
    value: Tensor,
    order: Tensor,
    offsets: Tensor,
    inside: Tensor | None,
    scale: float,
    outputs: tuple[Tensor | None, Tensor, Tensor],
) -> None:
    """Fill k̄ (B,H,C,X,D), which may be None, v̄ (B,H,C,X,E) and λ (B,H,C,X)."""
    (B, H, C, D), (G, M, E), X = centroids.shape, value.shape[1:], offsets.shape[2] - 1
    cell_keys, cell_values, cell_lse = outputs
    key, value = rows(key), rows(value)
    tiles = tiles_of("cells_forward", key.dtype, max(D, E))
    both = E + (0 if cell_keys is None else D)
    launch(
        cells_forward,
        (triton.cdiv(C, tiles.rows), X, B * H),
        work=Work(B * H * C * M * (D + both), B * G * M * (D + E) * key.element_size() + 4 * B * H * C * X * both),
        centroids=centroids,
        key=key,
        value=value,
        **strides("key", key),
        **strides("value", value),
        order=order,
        offsets=offsets,
        inside=inside,
        words=0 if inside is None else inside.shape[3],
        cell_keys=cell_keys,
        cell_values=cell_values,
        cell_lse=cell_lse,
        scale=scale,
        H=H,
        G=G,
        M=M,
        C=C,
        X=X,
        D=D,
        E=E,
        WIDTH=padded(D),
        VALUES=padded(E),
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        **tiles.options(),
    )


def cells_backward(
    x: Any,
    centroids: Tensor,
    order: Tensor,
    offsets: Tensor,
    inside: Tensor | None,
    shift: Tensor,
    grads: tuple[Tensor | None, Tensor, Tensor, Tensor | None],
    slots: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    outputs: tuple[Tensor, Tensor],
) -> Tensor:
    """Fill the gradients of keys and values; return that of the means, (B,H,C,D) in fp32.

    Args:
        x: key, value and scale.
        centroids: the means of the forward pass, and `order`, `offsets`, `inside` too.
        shift: λ, (B,H,C,X).
        grads: dk̄ or None, dv̄, c, and what stands in the brackets for keys that are inside, (B,H,C); None: nothing.
        slots: gradients of the listed keys, (B,H,C·K,D) and (B,H,C·K,E), the numbers of these rows sorted by key,
            (B,G,·), and where each key's begin, (B,G,M+1).
        outputs: gradients of key and value, in any layout.
    """
    key, value = rows(x.key), rows(x.value)
    (B, H, C, D), (G, M, E), X = centroids.shape, value.shape[1:], offsets.shape[2] - 1
    cell_keys, cell_values, constant, of_inside = grads
    common = {
        "centroids": centroids,
        "key": key,
        "value": value,
        **strides("key", key),
        **strides("value", value),
        "order": order,
        "inside": inside,
        "words": 0 if inside is None else inside.shape[3],
        "shift": shift,
        "cell_keys": cell_keys,
        "cell_values": cell_values,
        "constant": constant,
        "of_inside": of_inside,
        "scale": x.scale,
        **{"H": H, "G": G, "M": M, "C": C, "X": X, "D": D, "E": E},
        **{"WIDTH": padded(D), "VALUES": padded(E)},
    }
    products = B * H * C * M * (3 * D + E)
    of_means = centroids.new_empty(B, H, C, X, D)
    tiles = tiles_of("cells_to_means", key.dtype, max(D, E))
    launch(
        cells_to_means,
        (triton.cdiv(C, tiles.rows), X, B * H),
        work=Work(products, B * G * M * (D + E) * key.element_size() + 4 * of_means.numel()),
        offsets=offsets,
        of_means=of_means,
        **common,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        **tiles.options(),
    )
    grad_key, grad_value = outputs
    tiles = tiles_of("cells_to_keys", key.dtype, max(D, E))
    blocks = group_blocks(offsets, M, tiles.keys)
    slot_keys, slot_values, slot_rows, slot_offsets = slots or (None,) * 4
    launch(
        cells_to_keys,
        (blocks.count, B * G),
        work=Work(products + B * H * C * M * (D + E), 2 * B * G * M * (D + E) * key.element_size()),
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
        **tiles.options(),
    )
    return of_means.sum(3)


@triton.jit
def listed_inside(inside, words, head, C, row, place, there):
    """Whether the cluster of each row lists the key at each place of the order."""
    pointers = inside + (head * C + row)[:, None] * words + (place >> 5)[None, :]
    word = tl.load(pointers, mask=(row < C)[:, None] & there[None, :], other=0)
    return ((word >> (place & 31)[None, :]) & 1) != 0


@triton.jit
def cells_forward(
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
    offsets,
    inside,
    words,
    cell_keys,
    cell_values,
    cell_lse,
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
):
    """λ, k̄ and v̄ of one cell, for a tile of clusters: one softmax over the cell's keys."""
    head, cell = tl.program_id(2).to(tl.int64), tl.program_id(1)
    of_key = head // H * G + head % H // (H // G)
    key += of_key // G * key_b + of_key % G * key_h
    value += of_key // G * value_b + of_key % G * value_h
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    means = load_rows(centroids + head * C * D, D, row, row < C, D, WIDTH).to(key.dtype.element_ty)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    keys = tl.zeros((ROWS, WIDTH), tl.float32)
    values = tl.zeros((ROWS, VALUES), tl.float32)
    first, end = tl.load(offsets + of_key * (X + 1) + cell), tl.load(offsets + of_key * (X + 1) + cell + 1)
    for start in range(first, end, KEYS):
        place = start + tl.arange(0, KEYS)
        there = place < end
        token = tl.load(order + of_key * M + place, mask=there, other=0)
        k = load_rows(key, key_n, token, there, D, WIDTH)
        v = load_rows(value, value_n, token, there, E, VALUES)
        seen = there[None, :] & (row < C)[:, None]
        if inside is not None:
            seen = seen & ~listed_inside(inside, words, head, C, row, place, there)
        largest, factor, weights = seen_exponentials(dot(means, tl.trans(k)) * scale, seen, largest)
        total = total * factor + tl.sum(weights, 1)
        values = values * factor[:, None] + dot_wide(weights, v)
        if cell_keys is not None:
            keys = keys * factor[:, None] + dot_wide(weights, k)
    divisor = tl.where(total == 0, 1.0, total)[:, None]
    place_of_row = (head * C + row) * X + cell
    lse = tl.where(total == 0, float("-inf"), tl.log(total) + tl.where(largest == float("-inf"), 0.0, largest))
    tl.store(cell_lse + place_of_row, lse, mask=row < C)
    store_rows(cell_values + head * C * X * E + cell * E, X * E, row, row < C, values / divisor, E, VALUES)
    if cell_keys is not None:
        store_rows(cell_keys + head * C * X * D + cell * D, X * D, row, row < C, keys / divisor, D, WIDTH)


@triton.jit
def weight_gradients(weights, ks, vs, constant, seen, hidden, of_inside):
    """(w where a key is seen, ∂L/∂u): w (dk̄·k + dv̄·v + c), and for keys inside w times their own number, or 0."""
    of_logits = weights * (ks + vs + constant)
    if of_inside is not None:
        of_logits = tl.where(hidden, weights * of_inside, of_logits)
    else:
        of_logits = tl.where(hidden, 0.0, of_logits)
    return tl.where(seen & ~hidden, weights, 0.0), tl.where(seen, of_logits, 0.0)


@triton.jit
def cells_to_means(
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
    offsets,
    inside,
    words,
    shift,
    cell_keys,
    cell_values,
    constant,
    of_inside,
    of_means,
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
):
    """Σ_j ∂L/∂u_j·scale·k_j over one cell's keys, for a tile of clusters."""
    head, cell = tl.program_id(2).to(tl.int64), tl.program_id(1)
    of_key = head // H * G + head % H // (H // G)
    key += of_key // G * key_b + of_key % G * key_h
    value += of_key // G * value_b + of_key % G * value_h
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kind = key.dtype.element_ty
    means = load_rows(centroids + head * C * D, D, row, row < C, D, WIDTH).to(kind)
    of_row = (head * C + row) * X + cell
    lse = tl.load(shift + of_row, mask=row < C, other=float("-inf"))
    added = tl.load(constant + of_row, mask=row < C, other=0.0)
    grad_values = load_rows(cell_values + (head * C * X + cell) * E, X * E, row, row < C, E, VALUES).to(kind)
    if cell_keys is not None:
        grad_keys = load_rows(cell_keys + (head * C * X + cell) * D, X * D, row, row < C, D, WIDTH).to(kind)
    of_listed = None
    if of_inside is not None:
        of_listed = tl.load(of_inside + head * C + row, mask=row < C, other=0.0)[:, None]
    gradient = tl.zeros((ROWS, WIDTH), tl.float32)
    first, end = tl.load(offsets + of_key * (X + 1) + cell), tl.load(offsets + of_key * (X + 1) + cell + 1)
    for start in range(first, end, KEYS):
        place = start + tl.arange(0, KEYS)
        there = place < end
        token = tl.load(order + of_key * M + place, mask=there, other=0)
        k = load_rows(key, key_n, token, there, D, WIDTH)
        v = load_rows(value, value_n, token, there, E, VALUES)
        seen = there[None, :] & (lse != float("-inf"))[:, None]
        hidden = seen & False
        if inside is not None:
            hidden = listed_inside(inside, words, head, C, row, place, there)
        logits = tl.where(seen, dot(means, tl.trans(k)) * scale - lse[:, None], float("-inf"))
        ks = dot(grad_keys, tl.trans(k)) if cell_keys is not None else 0.0
        vs = dot(grad_values, tl.trans(v))
        _, of_logits = weight_gradients(tl.exp(logits), ks, vs, added[:, None], seen, hidden, of_listed)
        gradient += dot_wide(of_logits, k)
    store_rows(of_means + (head * C * X + cell) * D, X * D, row, row < C, gradient * scale, D, WIDTH)


@triton.jit
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
):
    """The gradients of a block of one cell's keys and values: from all clusters of the heads that share them."""
    of_key, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    x = tl.load(cell + of_key * blocks + block)
    place = tl.load(start + of_key * blocks + block) + tl.arange(0, KEYS)
    there = place < tl.load(stop + of_key * blocks + block)
    token = tl.load(order + of_key * M + place, mask=there, other=0)
    b, g, per = of_key // G, of_key % G, H // G
    k = load_rows(key + b * key_b + g * key_h, key_n, token, there, D, WIDTH)
    v = load_rows(value + b * value_b + g * value_h, value_n, token, there, E, VALUES)
    keys = tl.zeros((KEYS, WIDTH), tl.float32)
    values = tl.zeros((KEYS, VALUES), tl.float32)
    if x < X:
        for unit in range(0, per * tl.cdiv(C, ROWS)):  # the heads that share the keys, and tiles of their clusters
            head = b * H + g * per + unit // tl.cdiv(C, ROWS)
            row = unit % tl.cdiv(C, ROWS) * ROWS + tl.arange(0, ROWS)
            means = load_rows(centroids + head * C * D, D, row, row < C, D, WIDTH).to(k.dtype)
            of_row = (head * C + row) * X + x
            lse = tl.load(shift + of_row, mask=row < C, other=float("-inf"))
            added = tl.load(constant + of_row, mask=row < C, other=0.0)
            grad_values = load_rows(cell_values + (head * C * X + x) * E, X * E, row, row < C, E, VALUES).to(k.dtype)
            seen = there[None, :] & (lse != float("-inf"))[:, None]
            hidden = seen & False
            if inside is not None:
                hidden = listed_inside(inside, words, head, C, row, place, there)
            of_listed = None
            if of_inside is not None:
                of_listed = tl.load(of_inside + head * C + row, mask=row < C, other=0.0)[:, None]
            logits = tl.where(seen, dot(means, tl.trans(k)) * scale - lse[:, None], float("-inf"))
            vs = dot(grad_values, tl.trans(v))
            ks = 0.0
            if cell_keys is not None:
                grad_keys = load_rows(cell_keys + (head * C * X + x) * D, X * D, row, row < C, D, WIDTH).to(k.dtype)
                ks = dot(grad_keys, tl.trans(k))
            weights, of_logits = weight_gradients(tl.exp(logits), ks, vs, added[:, None], seen, hidden, of_listed)
            keys += dot_wide(tl.trans(of_logits), means) * scale
            if cell_keys is not None:
                keys += dot_wide(tl.trans(weights), grad_keys)
            values += dot_wide(tl.trans(weights), grad_values)
    if slot_rows is not None:  # what these keys got as listed ones, in the order of their slots
        begin = tl.load(slot_offsets + of_key * (M + 1) + token, mask=there, other=0)
        count = tl.load(slot_offsets + of_key * (M + 1) + token + 1, mask=there, other=0) - begin
        count = tl.where(there, count, 0)
        for step in range(0, tl.max(count, 0)):
            listed = step < count
            slot = tl.load(slot_rows + of_key * slots + begin + step, mask=listed, other=0)
            keys += load_rows(slot_keys + of_key * slots * D, D, slot, listed, D, WIDTH)
            values += load_rows(slot_values + of_key * slots * E, E, slot, listed, E, VALUES)
    store_rows(grad_key + b * grad_key_b + g * grad_key_h, grad_key_n, token, there, keys, D, WIDTH)
    store_rows(grad_value + b * grad_value_b + g * grad_value_h, grad_value_n, token, there, values, E, VALUES)
