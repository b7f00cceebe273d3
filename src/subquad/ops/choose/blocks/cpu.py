"""Tokens sorted by label into blocks, in compiled code."""

import torch
from torch import Tensor

from subquad.ops.choose.blocks.op import label_blocks, sorted_blocks
from subquad.ops.native import interface


@sorted_blocks.refusal("cpu")
def refusal(labels: Tensor, *_: object) -> str | None:
    """Why the compiled kernel cannot take these labels; None where it can."""
    return interface.refusal_of_any_dtype(labels)


@label_blocks.on("cpu")
def compute(outputs: tuple[Tensor, Tensor, Tensor], labels: Tensor, buckets: int, size: int) -> None:
    """As `sorted_blocks`."""
    interface.check("by_bucket", labels=(labels, torch.int64, tuple(labels.shape)))
    tokens, bucket, used = outputs
    B, H, N = labels.shape
    interface.run(
        "bucket_blocks",
        B=B,
        H=H,
        N=N,
        buckets=buckets,
        slots=size,
        threads=interface.threads(32 * labels.numel()),
        labels=labels,
        tokens=tokens,
        bucket=bucket,
        used=used,
    )
