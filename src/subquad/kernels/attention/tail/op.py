"""The op `attend_with_tail`: the exact keys of a cluster, and all other keys as a few cells."""

from typing import Any

import torch
from torch import Tensor

from subquad.core.versions import sym_min
from subquad.kernels.attention.tail import reference
from subquad.kernels.dispatch import Op
from subquad.kernels.operators import Gradient
from subquad.kernels.tensors import differentiated, token_major

attend_with_tail = Op(reference.attend_with_tail)

T = Tensor
Saved = tuple[T, T, T, T, T, T, T, T, T, T, T, T, T, T, T]  # the outputs of `tail_forward`

INPUTS = "query", "key", "value", "labels", "cell", "keys", "wanted", "terms", "means", "around", "start"
SETTINGS = "clusters", "topk", "cells", "scale", "window"


@attend_with_tail.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend, where `topk` are at most all keys."""
    topk = sym_min(x.topk, x.key.shape[2]) if x.keys is None else x.keys.shape[3]
    means, around = (None if y is None else y.float().contiguous() for y in (x.means, x.around))
    inputs = x.query, x.key, x.value, x.labels, x.cell, x.keys, x.wanted, None, means, around, x.start
    tensors = [y for y in (x.query, x.key, x.value, means) if y is not None]
    operator = tail_forward if differentiated(*tensors) else tail_output
    out, lse, *_ = operator.run(backend, *inputs, x.clusters, topk, x.cells, x.scale, x.window)
    return out, lse


@attend_with_tail.operator(*INPUTS, *SETTINGS, terms=Tensor | None)
def tail_forward(x: Any) -> Saved:
    """Allocate (out, lse), and what the backward pass needs: lists of tokens, means, and the cells as they see them.

    Behind the cells' log-sum-exps comes what rounding took from them. The last three are for a window: each query's
    logits of the cells less those of the mean, whether its cells count, and what rounding took from its log-sum-exp.

    The gradient flows through the cells too, not through the output of the means. With `terms`, (B,H,M) in fp32, keys
    are chosen by these instead of those of `terms_of_choice`.
    """
    _check_counts("tail_forward", x)
    (B, H, N, D), E, C, X = x.query.shape, x.value.shape[3], x.clusters, x.cells
    of_cells = (B, H, C, X, D), (B, H, C, X, E), (B, H, C, X), (B, H, C, X)
    cell_keys, cell_values, cell_lse, residual = (x.query.new_empty(shape, dtype=torch.float32) for shape in of_cells)
    lse = x.query.new_empty(B, H, N, dtype=torch.float32)
    of_near = [x.query.new_empty(shape, dtype=torch.float32) for shape in near_shapes(x)]
    return token_major(x.query, E), lse, *new_lists(x), cell_keys, cell_values, cell_lse, residual, *of_near


def near_shapes(x: Any) -> list[tuple[int, ...]]:
    """The shapes of the last three outputs; empty without a window."""
    (B, H, N, _), X = x.query.shape, x.cells
    return [(B, H, N, X), (B, H, N), (B, H, N)] if x.window else [(0,)] * 3


def new_lists(x: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate what both passes read, except the cells: order, offsets, key_order, cell_offsets, top, and the means."""
    (B, H, N, D), (_, G, M, _), C = x.query.shape, x.value.shape, x.clusters
    lists = (B, H, N), (B, H, C + 1), (B, G, M), (B, G, x.cells + 1), (B, H, C, x.topk)
    order, offsets, key_order, cell_offsets, top = (x.query.new_empty(shape, dtype=torch.int32) for shape in lists)
    return order, offsets, key_order, cell_offsets, top, x.query.new_empty(B, H, C, D, dtype=torch.float32)


def _check_counts(op: str, x: Any) -> None:
    if x.clusters < 1 or x.cells < 1 or x.topk < 0 or x.window < 0:
        raise ValueError(
            f"{op}: clusters={x.clusters}, cells={x.cells}, topk={x.topk} and window={x.window}, but there must be 1, "
            "1, 0 and 0 at least"
        )


@attend_with_tail.operator(*INPUTS, *SETTINGS, terms=Tensor | None)
def tail_output(x: Any) -> tuple[Tensor, Tensor]:
    """Allocate (out, lse), those of `tail_forward`, if no gradient is needed."""
    _check_counts("tail_output", x)
    lse = x.query.new_empty(x.query.shape[:3], dtype=torch.float32)
    return token_major(x.query, x.value.shape[3]), lse


tail_backward = Gradient(tail_forward, "query", "key", "value", "means", title="attention with a tail")


@tail_output.flops
@tail_forward.flops
def forward_flops(x: Any) -> int:
    """Operations of the products: of means with all keys, of queries with exact keys, near ones and cells."""
    (B, H, N, D), E = x.query, x.value[3]
    of_cells = x.clusters * x.value[2] * (2 * D + E)
    return 2 * B * H * (of_cells + N * ((x.topk + x.cells) * (D + E) + _near(x) * (2 * D + E)))


@tail_backward.flops
def backward_flops(x: Any) -> int:
    """The logits again, the gradients of both sides of all products."""
    (B, H, N, D), E = x.query, x.value[3]
    of_cells = x.clusters * x.value[2] * (5 * D + 2 * E)
    return 2 * B * H * (of_cells + N * ((x.topk + x.cells) * (3 * D + 2 * E) + _near(x) * (6 * D + 2 * E)))


def _near(x: Any) -> int:
    """Keys near a query, at most."""
    return min(2 * x.window + 1, x.value[2]) if x.window else 0
