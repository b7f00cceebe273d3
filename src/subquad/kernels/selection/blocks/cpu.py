"""Tokens sorted by label into blocks, in compiled code."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.native import interface
from subquad.kernels.selection.blocks.op import label_blocks, sorted_blocks


@sorted_blocks.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take these labels; None if it can."""
    return interface.refusal(x.labels, any_dtype=True)


@label_blocks.on("cpu")
def compute(outputs: tuple[Tensor, Tensor, Tensor], x: Any) -> None:
    """The CPU backend of `sorted_blocks`."""
    interface.check("by_bucket", labels=(x.labels, torch.int64, tuple(x.labels.shape)))
    sizes = dict(zip("BHN", x.labels.shape, strict=True)) | {"buckets": x.buckets, "slots": x.size}
    lists = dict(zip(("tokens", "bucket", "used"), outputs, strict=True))
    interface.run("bucket_blocks", **sizes, threads=interface.threads(32 * x.labels.numel()), labels=x.labels, **lists)
