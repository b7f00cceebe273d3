"""Tokens sorted by label into blocks, in compiled code."""

import torch
from torch import Tensor

from subquad.ops.choose.blocks.op import label_blocks, sorted_blocks
from subquad.ops.native import interface
from subquad.ops.native.interface import pointer


@sorted_blocks.refusal("cpu")
def refusal(labels: Tensor, *_: object) -> str | None:
    """Why the compiled kernel cannot take these labels; None where it can."""
    return interface.refusal_of_any_dtype(labels)


@label_blocks.on("cpu")
def compute(outputs: tuple[Tensor, Tensor, Tensor], labels: Tensor, buckets: int, size: int) -> None:
    """As `sorted_blocks`."""
    interface.check("by_bucket", labels=(labels, torch.int64, tuple(labels.shape)))
    labels = labels.contiguous()
    B, H, N = labels.shape
    axes = interface.Sizes(B, H, H, N, N, 1, 1, buckets, size, 0, 0, interface.threads(32 * labels.numel()))
    interface.run("bucket_blocks", interface.Blocking(axes, pointer(labels), *(pointer(x) for x in outputs)))
