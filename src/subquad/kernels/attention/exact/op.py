"""The op `exact_partial`."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.exact import reference
from subquad.kernels.dispatch import Op
from subquad.kernels.operators import Gradient
from subquad.kernels.tensors import token_major

exact_partial = Op(reference.exact_partial)


@exact_partial.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend."""
    inputs = x.query, x.key, x.value, x.valid, x.valid_queries
    out, lse, _ = exact_forward.run(backend, *inputs, x.causal, x.offset, x.scale)
    return out, lse


@exact_partial.operator("query", "key", "value", "valid", "valid_queries", "causal", "offset", "scale")
def exact_forward(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate out, lse, and the residual that rounding took from lse, which the backward pass reads."""
    lse, residual = (x.query.new_empty(x.query.shape[:3], dtype=torch.float32) for _ in range(2))
    return token_major(x.query, x.value.shape[3]), lse, residual


exact_backward = Gradient(exact_forward, "query", "key", "value", title="exact attention")


@exact_forward.flops
def forward_flops(x: Any) -> int:
    """Operations of the products: logits, weighted values."""
    (B, H, N, D), (_, _, M, E) = x.query, x.value
    return 2 * B * H * N * M * (D + E)


@exact_backward.flops
def backward_flops(x: Any) -> int:
    """The logits again and the gradients of both their sides; the gradients of weights and values."""
    (B, H, N, D), (_, _, M, E) = x.query, x.value
    return 2 * B * H * N * M * (3 * D + 2 * E)
