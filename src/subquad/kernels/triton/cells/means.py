"""The gradient of the means: a program takes one cell and a tile of clusters."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.cells.pair_weights import listed_inside, weight_gradients
from subquad.kernels.triton.launch import (
    dot_upcast,
    inner_of,
    kernel,
    key_head,
    launch,
    load_ends,
    load_positions,
    load_rows,
    of_head,
    slice_of,
    store_rows,
)
from subquad.kernels.triton.recording import LaunchCost
from subquad.kernels.triton.tiles import tiles_of


def differentiate_means(common: dict[str, Any], key: Tensor, value: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of the means through all cells, (B,H,C,D) in fp32; `common` is what both kernels read."""
    (B, H, C, D), (G, M, E), X = common["centroids"].shape, value.shape[1:], offsets.shape[2] - 1
    of_means = common["centroids"].new_empty(B, H, C, X, D)
    tiles = tiles_of("cells_to_means", key.dtype, max(D, E))
    read = B * G * M * (D + E) * key.element_size()
    launch(
        cells_to_means,
        (triton.cdiv(C, tiles.rows), X, B * H),
        cost=LaunchCost(B * H * C * M * (3 * D + E), read + 4 * of_means.numel()),
        offsets=offsets,
        of_means=of_means,
        **common,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        SLICE=slice_of(key),
        **tiles.options(),
    )
    return of_means.sum(3)


@kernel
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
    SLICE: tl.constexpr,
):
    """Σ_j ∂L/∂u_j·scale·k_j over one cell's keys, for a tile of clusters."""
    head, cell = tl.program_id(2).to(tl.int64), tl.program_id(1)
    of_key = key_head(head, H, G)
    key, value = of_head(key, of_key, G, key_b, key_h), of_head(value, of_key, G, value_b, value_h)
    order += of_key * M
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kind = key.dtype.element_ty
    centroids += head * C * D
    cell_values += (head * C * X + cell) * E
    means = load_rows(centroids, D, row, row < C, D, WIDTH).to(kind)
    of_row = (head * C + row) * X + cell
    lse = tl.load(shift + of_row, mask=row < C, other=float("-inf"))
    added = tl.load(constant + of_row, mask=row < C, other=0.0)
    grad_values = load_rows(cell_values, X * E, row, row < C, E, VALUES).to(kind)
    if cell_keys is not None:
        cell_keys += (head * C * X + cell) * D
        grad_keys = load_rows(cell_keys, X * D, row, row < C, D, WIDTH).to(kind)
    of_listed = None
    if of_inside is not None:
        of_listed = tl.load(of_inside + head * C + row, mask=row < C, other=0.0)[:, None]
    gradient = tl.zeros((ROWS, WIDTH), tl.float32)
    first, end = load_ends(offsets, of_key, cell, X)
    for start in range(first, end, KEYS):
        position = start + tl.arange(0, KEYS)
        token, present = load_positions(order, position, end)
        k = load_rows(key, key_n, token, present, D, WIDTH)
        v = load_rows(value, value_n, token, present, E, VALUES)
        keyed = k, key, key_n, token, present
        allowed = present[None, :] & (lse != float("-inf"))[:, None]
        hidden = allowed & False
        if inside is not None:
            hidden = listed_inside(inside, words, head, C, row, position, present)
        logits = inner_of(means, centroids, D, row, row < C, *keyed, D, SLICE) * scale
        logits = tl.where(allowed, logits - lse[:, None], float("-inf"))
        ks = 0.0
        if cell_keys is not None:
            ks = inner_of(grad_keys, cell_keys, X * D, row, row < C, *keyed, D, SLICE)
        vs = inner_of(grad_values, cell_values, X * E, row, row < C, v, value, value_n, token, present, E, SLICE)
        _, of_logits = weight_gradients(tl.exp(logits), ks, vs, added[:, None], allowed, hidden, of_listed)
        gradient += dot_upcast(of_logits, k)
    store_rows(of_means + (head * C * X + cell) * D, X * D, row, row < C, gradient * scale, D, WIDTH)
