"""Attention to the lists of clusters in compiled code, in fp32."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.listed.op import attend_listed, listed_backward, listed_forward
from subquad.kernels.native import interface


@attend_listed.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernels cannot take this call; None if they can."""
    if x.query.dtype != torch.float32:
        return f"the dtype is {x.query.dtype}, and the kernels take fp32"
    return interface.refusal(x.query)


@listed_forward.on("cpu")
def forward(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """The CPU backend of `attend_listed`."""
    interface.run("listed_forward", inputs=_inputs("listed_forward", x), out=outputs[0], lse=outputs[1])


@listed_backward.on("cpu")
def backward(grads: tuple[Tensor, Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key, value and bias."""
    grad_out, grad_lse = x.grads
    of_lse = tuple(x.query.shape[:3])
    interface.check(
        "listed_backward",
        grad_out=(grad_out, torch.float32, (*of_lse, x.value.shape[3])),
        grad_lse=(grad_lse, torch.float32, of_lse),
    )
    names = "grad_query", "grad_key", "grad_value", "grad_bias"
    interface.run(
        "listed_backward",
        inputs=_inputs("listed_backward", x),
        grad_out=grad_out,
        grad_lse=grad_lse,
        **dict(zip(names, grads, strict=True)),
    )


def _inputs(op: str, x: Any) -> dict[str, Any]:
    """The checked inputs of the forward and backward kernels."""
    (B, H, N, D), (R, E), (C, K) = x.query.shape, x.value.shape[2:], x.lists.shape[2:]
    interface.check(
        op,
        key=(x.key, torch.float32, (B, H, R, D)),
        value=(x.value, torch.float32, (B, H, R, E)),
        bias=(x.bias, torch.float32, (B, H, R)),
        labels=(x.labels, torch.int64, (B, H, N)),
        lists=(x.lists, torch.int64, (B, H, C, K)),
    )
    return (
        {"B": B, "H": H, "N": N, "D": D, "E": E, "clusters": C, "slots": K, "rows": R, "scale": x.scale}
        | {"threads": interface.threads(B * H * N * K * (D + E))}
        | {"query": x.query, "key": x.key, "value": x.value, "bias": x.bias, "labels": x.labels, "lists": x.lists}
    )
