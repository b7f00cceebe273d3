"""Attention to exact keys and a tail of cells in compiled code, in fp32, bf16 or fp16."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.tail.op import (
    attend_with_tail,
    near_shapes,
    new_lists,
    tail_backward,
    tail_forward,
    tail_output,
)
from subquad.kernels.attention.tail.visible_key_cells import lists_of, visible_key_cells
from subquad.kernels.native import interface

# The outputs of the forward pass in addition to `out` and `lse`, in its order.
LISTS = ("order", "offsets", "key_order", "cell_offsets", "top")
SAVED = (*LISTS, "centroids", "cell_keys", "cell_values", "cell_lse", "cell_residual")
NEAR = ("shifts", "kept", "residual")


@attend_with_tail.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernels cannot take this call; None if they can."""
    if x.dropout_p > 0:
        return f"dropout_p={x.dropout_p}, and the kernels have no dropout"
    return interface.refusal(x.query)


@visible_key_cells.refusal("cpu")
def refusal_of_few(x: Any) -> str | None:
    """The reason why the compiled kernels cannot take these queries; None if they can."""
    return interface.refusal(x.query)


@lists_of("cpu")
def numbers(top: Tensor, key_order: Tensor, keys: int) -> Tensor:
    """Keys by their places in the order of the cells, −1 behind the last."""
    B, H, C, K = top.shape
    share = H // key_order.shape[1]
    ranks = top.long().clamp(min=0).view(B, key_order.shape[1], share * C * K)
    return torch.where(top < 0, keys, key_order.long().gather(2, ranks).view(B, H, C, K)).sort(-1).values


@tail_forward.on("cpu")
def forward(outputs: tuple[Tensor | None, ...], x: Any) -> None:
    """The output, its log-sum-exp, and all that the backward pass needs.

    Raises:
        ValueError: labels or cells that are none of those that there are.
    """
    out, lse, *saved = outputs
    B, H, _, D = x.query.shape
    of_keys = x.keys, torch.int64, (B, H, x.clusters, x.topk)
    of_terms = x.terms, torch.float32, (B, H, x.key.shape[2])
    of_means = x.means, torch.float32, (B, H, x.clusters, D)
    interface.check("tail_forward", keys=of_keys, wanted=(x.wanted, torch.int64, (B,)), terms=of_terms)
    interface.check("tail_forward", means=of_means, around=(x.around, torch.float32, (B, H, D, D)))
    near = saved[len(SAVED) :] if x.window else [None] * len(NEAR)
    interface.run(
        "tail_forward",
        inputs=_inputs("tail_forward", x),
        keys=x.keys,
        wanted=x.wanted,
        terms=x.terms,
        means=x.means,
        around=x.around,
        out=out,
        lse=lse,
        saved=dict(zip((*SAVED, *NEAR), (*saved[: len(SAVED)], *near), strict=True)),
    )


@tail_output.on("cpu")
def output(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """The output and its log-sum-exp alone: the cells stay in the cache."""
    forward((*outputs, *new_lists(x), *[None] * 7), x)


@tail_backward.on("cpu")
def backward(grads: tuple[Tensor, Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key and value, and of means that are not those of the queries.

    Raises:
        ValueError: the lists hold numbers that the forward pass cannot have made.
    """
    inputs, (out, lse, *saved) = _inputs("tail_backward", x), x.outputs
    grad_out, grad_lse, *_, of_keys, of_values, of_lse, _, _, _, _ = x.grads
    (B, H, N, D), (_, G, M, E), C, X = x.query.shape, x.value.shape, x.clusters, x.cells
    lists = (B, H, N), (B, H, C + 1), (B, G, M), (B, G, X + 1), (B, H, C, x.topk)
    numbers = (B, H, C, D), (B, H, C, X, D), (B, H, C, X, E), (B, H, C, X), (B, H, C, X)
    wanted = [(torch.int32, shape) for shape in lists] + [
        (torch.float32, shape) for shape in (*numbers, *near_shapes(x))
    ]
    names = (*SAVED, *NEAR)
    fitting = {name: (each, *expected) for name, each, expected in zip(names, saved, wanted, strict=True)}
    fitting |= {"out": (out, x.query.dtype, (B, H, N, E)), "lse": (lse, torch.float32, (B, H, N))}
    grad_of_out = (grad_out, x.query.dtype, (B, H, N, E))
    of_cells = {"cell_keys": of_keys, "cell_values": of_values, "cell_lse": of_lse}
    fitting |= {f"grad_{name}": (grad, *fitting[name][1:]) for name, grad in of_cells.items()}
    interface.check("tail_backward", grad_out=grad_of_out, grad_lse=(grad_lse, torch.float32, (B, H, N)), **fitting)
    grad_means = None if x.means is None else torch.empty_like(x.means)
    interface.run(
        "tail_backward",
        inputs=inputs,
        saved={
            name: each.contiguous() if x.window or name not in NEAR else None
            for name, each in zip(names, saved, strict=True)
        },
        out=out,
        lse=lse.contiguous(),
        grad_out=grad_out,
        grad_lse=grad_lse,
        **{f"grad_{name}": grad for name, grad in of_cells.items()},
        **dict(zip(("grad_query", "grad_key", "grad_value"), grads[:3], strict=True)),
        grad_means=grad_means,
    )
    if grad_means is not None:
        grads[3].copy_(grad_means)


def _inputs(op: str, x: Any) -> dict[str, Any]:
    """The checked inputs of the forward and backward kernels."""
    (B, H, N, D), (_, G, M, E), dtype = x.query.shape, x.value.shape, x.query.dtype
    interface.check(
        op,
        (H, G),
        key=(x.key, dtype, (B, G, M, D)),
        value=(x.value, dtype, (B, G, M, E)),
        labels=(x.labels, torch.int64, (B, H, N)),
        cell=(x.cell, torch.int64, (B, G, M)),
        start=(x.start, torch.int64, (B,)),
    )
    cost = B * H * (x.clusters * M + N * (x.topk + x.cells + 2 * x.window)) * (D + E)
    return (
        {"B": B, "H": H, "G": G, "N": N, "M": M, "D": D, "E": E, "threads": interface.threads(cost), "dtype": dtype}
        | {"clusters": x.clusters, "topk": x.topk, "cells": x.cells, "scale": x.scale}
        | {"window": x.window, "start": x.start}
        | {"query": x.query, "key": x.key, "value": x.value, "labels": x.labels, "cell": x.cell}
    )
