"""Exact attention with its log-sum-exp in compiled code, in fp32, bf16 or fp16."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.exact.op import exact_backward, exact_forward, exact_partial
from subquad.kernels.native import interface


@exact_partial.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernels cannot take this call; None if they can."""
    return interface.refusal(x.query)


@exact_forward.on("cpu")
def forward(outputs: tuple[Tensor, Tensor, Tensor], x: Any) -> None:
    """The output, its log-sum-exp, and the residual of that."""
    out, lse, residual = outputs
    interface.run("exact_forward", inputs=_inputs("exact_forward", x), out=out, lse=lse, residual=residual)


@exact_backward.on("cpu")
def backward(grads: tuple[Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key and value."""
    inputs, (grad_out, grad_lse, _), (out, lse, residual) = _inputs("exact_backward", x), x.grads, x.outputs
    of_out, of_lse = (*x.query.shape[:3], x.value.shape[3]), tuple(x.query.shape[:3])
    interface.check(
        "exact_backward",
        grad_out=(grad_out, x.query.dtype, of_out),
        grad_lse=(grad_lse, torch.float32, of_lse),
        out=(out, x.query.dtype, of_out),
        lse=(lse, torch.float32, of_lse),
        residual=(residual, torch.float32, of_lse),
    )
    outputs = {"out": out, "lse": lse, "residual": residual, "grad_out": grad_out, "grad_lse": grad_lse}
    of_inputs = dict(zip(("grad_query", "grad_key", "grad_value"), grads, strict=True))
    interface.run("exact_backward", inputs=inputs, **outputs, **of_inputs)


def _inputs(op: str, x: Any) -> dict[str, Any]:
    """The checked inputs of the forward and backward kernels."""
    (B, H, N, D), (_, G, M, E), dtype = x.query.shape, x.value.shape, x.query.dtype
    interface.check(
        op,
        (H, G),
        key=(x.key, dtype, (B, G, M, D)),
        value=(x.value, dtype, (B, G, M, E)),
        valid=(x.valid, torch.bool, (B, M)),
        valid_queries=(x.valid_queries, torch.bool, (B, N)),
    )
    return (
        {"B": B, "H": H, "G": G, "N": N, "M": M, "D": D, "E": E, "dtype": dtype, "scale": x.scale}
        | {"threads": interface.threads(B * H * N * M * (D + E)), "causal": x.causal}
        | {"offset": max(-N, min(x.offset, M))}  # beyond, all queries see all keys, or none
        | {"query": x.query, "key": x.key, "value": x.value, "key_valid": x.valid, "query_valid": x.valid_queries}
    )
