"""Exact attention of a few queries in compiled code, in fp32, bf16 or fp16."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.steps.op import MOST_QUERIES, attend_few, steps_forward
from subquad.kernels.native import interface
from subquad.kernels.tensors import differentiated

READ = 8  # products that take as long as to read a number from memory


@attend_few.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take this call; None if it can."""
    reason = interface.refusal(x.query)
    if reason is None and differentiated(x.query, x.key, x.value):
        return "a gradient is wanted, and the kernel has none"
    if reason is None and x.query.shape[2] > MOST_QUERIES:
        return f"there are {x.query.shape[2]} queries, and the kernel is for up to {MOST_QUERIES}"
    if reason is None and x.softcap is not None and x.softcap <= 0:
        return f"softcap is {x.softcap}, and the kernel knows positive ones"
    return reason


@steps_forward.on("cpu")
def forward(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """The output and its log-sum-exp."""
    interface.run("steps_forward", **_arguments(outputs, x))


@steps_forward.prepared_on("cpu")
def prepare(x: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The output of calls of these shapes."""
    (B, H, N, _), E = x.query.shape, x.value.shape[3]
    outputs = steps_forward.outputs(x)
    run = interface.repeated("steps_forward", ("query", "key", "value", "out"), **_arguments(outputs, x))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(B, N, H, E).transpose(1, 2)
        run(query, key, value, out)
        return out

    return attend


def _arguments(outputs: tuple[Tensor, Tensor], x: Any) -> dict[str, Any]:
    """The kernel's checked inputs and outputs."""
    (B, H, N, D), (_, G, M, E), dtype = x.query.shape, x.value.shape, x.query.dtype
    interface.check(
        "steps_forward",
        (H, G),
        key=(x.key, dtype, (B, G, M, D)),
        value=(x.value, dtype, (B, G, M, E)),
        valid=(x.valid, torch.bool, (B, M)),
        valid_queries=(x.valid_queries, torch.bool, (B, N)),
        offsets=(x.offsets, torch.int64, (B,)),
    )
    out, lse = outputs
    return {
        **{"B": B, "H": H, "G": G, "N": N, "M": M, "D": D, "E": E, "dtype": dtype, "scale": x.scale},
        **{"causal": x.causal, "offset": x.offset, "window": -1 if x.window is None else x.window},
        "softcap": x.softcap or 0.0,
        "threads": interface.threads(B * M * (D + E) * (H * N + READ * G)),
        **{"query": x.query, "key": x.key, "value": x.value, "out": out, "lse": lse},
        **{"query_valid": x.valid_queries, "key_valid": x.valid, "offsets": x.offsets},
    }
