"""The op `attend_with_tail`: the exact keys of a cluster, and all other keys as a few cells."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.tail import reference
from subquad.kernels.dispatch import Op
from subquad.kernels.operators import Gradient
from subquad.kernels.tensors import token_major

attend_with_tail = Op(reference.attend_with_tail)

INPUTS = "query", "key", "value", "labels", "cell", "keys", "wanted", "cell_means"
SETTINGS = "clusters", "topk", "cells", "scale"


@attend_with_tail.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend, where `topk` are at most all keys."""
    topk = torch.sym_min(x.topk, x.key.shape[2]) if x.keys is None else x.keys.shape[3]
    inputs = x.query, x.key, x.value, x.labels, x.cell, x.keys, x.wanted, None
    out, lse, *_ = tail_forward.run(backend, *inputs, x.clusters, topk, x.cells, x.scale)
    return out, lse


@attend_with_tail.operator(*INPUTS, *SETTINGS, cell_means=Tensor | None)
def tail_forward(
    x: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate (out, lse), and what the backward pass needs: lists of tokens, means, and the cells as they see them.

    The last output is the residual that rounding took from the cells' log-sum-exps.

    The gradient flows through the cells too, not through the means. With `cell_means`, (B,G,X,D) in fp32, distances are
    from these.
    """
    (B, H, N, D), (_, G, M, E), C, X, topk = x.query.shape, x.value.shape, x.clusters, x.cells, x.topk
    if C < 1 or X < 1 or topk < 0:
        raise ValueError(
            f"tail_forward: clusters={C}, cells={X} and topk={topk}, but there must be 1, 1 and 0 at least"
        )
    lists = (B, H, N), (B, H, C + 1), (B, G, M), (B, G, X + 1), (B, H, C, topk)
    numbers = (B, H, N), (B, H, C, D), (B, H, C, X, D), (B, H, C, X, E), (B, H, C, X), (B, H, C, X)
    order, offsets, key_order, cell_offsets, top = (x.query.new_empty(shape, dtype=torch.int32) for shape in lists)
    lse, means, *cells = (x.query.new_empty(shape, dtype=torch.float32) for shape in numbers)
    cell_keys, cell_values, cell_lse, residual = cells
    saved = order, offsets, key_order, cell_offsets, top, means, cell_keys, cell_values, cell_lse, residual
    return token_major(x.query, E), lse, *saved


tail_backward = Gradient(tail_forward, "query", "key", "value", title="attention with a tail")


@tail_forward.flops
def forward_flops(x: Any) -> int:
    """Operations of the products: of means with all keys, of queries with exact keys and cells."""
    (B, H, N, D), E = x.query, x.value[3]
    of_cells = x.clusters * x.value[2] * (2 * D + E)
    return 2 * B * H * (of_cells + N * (x.topk + x.cells) * (D + E))


@tail_backward.flops
def backward_flops(x: Any) -> int:
    """The logits again, the gradients of both sides of all products."""
    (B, H, N, D), E = x.query, x.value[3]
    of_cells = x.clusters * x.value[2] * (5 * D + 2 * E)
    return 2 * B * H * (of_cells + N * (x.topk + x.cells) * (3 * D + 2 * E))
