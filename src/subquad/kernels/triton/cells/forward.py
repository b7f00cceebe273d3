"""The forward pass: a program takes one cell and a tile of clusters."""

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.cells.pair_weights import listed_inside
from subquad.kernels.triton.launch import (
    LOWEST,
    allowed_exponentials,
    dot_shrunk,
    inner_of,
    kernel,
    key_head,
    launch,
    load_ends,
    load_positions,
    load_rows,
    of_head,
    padded,
    rows,
    slice_of,
    store_rows,
    strides,
    unshrunk,
)
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import tiles_of


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
        cost=LaunchCost(
            B * H * C * M * (D + both), B * G * M * (D + E) * key.element_size() + 4 * B * H * C * X * both
        ),
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
        SLICE=slice_of(key),
        **tiles.options(),
    )


@kernel
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
    SLICE: tl.constexpr,
):
    """λ, k̄ and v̄ of one cell, for a tile of clusters: one softmax over the cell's keys."""
    head, cell = tl.program_id(2).to(tl.int64), tl.program_id(1)
    of_key = key_head(head, H, G)
    key, value = of_head(key, of_key, G, key_b, key_h), of_head(value, of_key, G, value_b, value_h)
    order += of_key * M
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    centroids += head * C * D
    means = load_rows(centroids, D, row, row < C, D, WIDTH).to(key.dtype.element_ty)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    keys = tl.zeros((ROWS, WIDTH), tl.float32)
    values = tl.zeros((ROWS, VALUES), tl.float32)
    first, end = load_ends(offsets, of_key, cell, X)
    for start in range(first, end, KEYS):
        position = start + tl.arange(0, KEYS)
        token, present = load_positions(order, position, end)
        k = load_rows(key, key_n, token, present, D, WIDTH)
        v = load_rows(value, value_n, token, present, E, VALUES)
        allowed = present[None, :] & (row < C)[:, None]
        if inside is not None:
            allowed = allowed & ~listed_inside(inside, words, head, C, row, position, present)
        logits = inner_of(means, centroids, D, row, row < C, k, key, key_n, token, present, D, SLICE) * scale
        logits = tl.where(logits == float("-inf"), LOWEST, logits)
        largest, factor, weights = allowed_exponentials(logits, allowed, largest)
        total = total * factor + tl.sum(weights, 1)
        values = values * factor[:, None] + dot_shrunk(weights, v)
        if cell_keys is not None:
            keys = keys * factor[:, None] + dot_shrunk(weights, k)
    divisor = tl.where(total == 0, 1.0, total)[:, None]
    index_of_row = (head * C + row) * X + cell
    lse = tl.where(total == 0, float("-inf"), tl.log(total) + tl.where(largest == float("-inf"), 0.0, largest))
    # Keys whose logits are all −∞ have no mean, so that their cell in a tail has a λ of NaN; −∞ is that of no keys.
    lost = (largest == LOWEST) & (total == total)
    lse = tl.where(lost, float("-inf") if cell_keys is None else float("nan"), lse)
    tl.store(cell_lse + index_of_row, lse, mask=row < C)
    values = unshrunk(values / divisor, value)
    store_rows(cell_values + head * C * X * E + cell * E, X * E, row, row < C, values, E, VALUES)
    if cell_keys is not None:
        keys = unshrunk(keys / divisor, key)
        store_rows(cell_keys + head * C * X * D + cell * D, X * D, row, row < C, keys, D, WIDTH)
