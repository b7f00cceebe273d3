"""Partials of windows of queries merged in compiled code: each is read once."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.windows.op import merge_windows, merged_windows, windows_of
from subquad.kernels.native import interface


@merge_windows.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take these partials; None if it can."""
    if any(out.dtype != x.outs[0].dtype for out in x.outs):
        return "the partials have different dtypes"
    return interface.refusal(x.outs[0])


@merged_windows.on("cpu")
def compute(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """The merged output, and its log-sum-exp."""
    out, lse = outputs
    (B, H, N), E, dtype = lse.shape, out.shape[3], x.outs[0].dtype
    parts = []
    for each, of_each, windows in zip(x.outs, x.lses, windows_of(x.numbers), strict=True):
        first, length, step, count = windows.numbers()
        shape = B * count, H, length
        interface.check("merge_windows", out=(each, dtype, (*shape, E)), lse=(of_each, torch.float32, shape))
        parts.append({"first": first, "queries": length, "step": step, "windows": count, "out": each, "lse": of_each})
    threads = interface.threads(B * H * N * E * len(parts))
    sizes = {"B": B, "H": H, "N": N, "E": E, "dtype": dtype, "rounded": x.rounded, "threads": threads}
    interface.run("merge_windows", **sizes, parts=parts, out=out, lse=lse)
