"""Filling buckets in compiled code: the tokens that score highest in each, and tokens by their bucket in blocks."""

import torch
from torch import Tensor

from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, with_contiguous_rows


def refusal(scores: Tensor) -> str | None:
    """Why the compiled kernels cannot rank by these scores; None where they can."""
    if scores.dtype in (torch.bfloat16, torch.float16):
        return f"the dtype is {scores.dtype}, and buckets are filled by fp32 scores"
    return interface.refusal(scores)


@torch.library.custom_op("subquad::top_of_each_bucket", mutates_args=(), device_types="cpu")
def top_of_each_bucket(
    scores: Tensor, sizes: Tensor, most: int, real: Tensor | None, odds: bool
) -> tuple[Tensor, Tensor]:
    """As `subquad.ops.bucketing.top_and_best`."""
    scores, real = with_contiguous_rows(scores), None if real is None else real.contiguous()
    sizes = sizes.to(torch.int64).contiguous()
    slots, best = _slots(scores, most)
    B, H, N, C = scores.shape
    axes = interface.Sizes(B, H, H, N, N, C, C, C, slots.shape[3], 0, 0, interface.threads(32 * scores.numel()))
    pointers = (pointer(x) for x in (slots, best))
    interface.run("bucket_top", interface.Selecting(axes, rows(scores), pointer(real), pointer(sizes), odds, *pointers))
    return slots, best


@top_of_each_bucket.register_fake
def _(scores: Tensor, sizes: Tensor, most: int, real: Tensor | None, odds: bool) -> tuple[Tensor, Tensor]:
    return _slots(scores, most)


def _slots(scores: Tensor, most: int) -> tuple[Tensor, Tensor]:
    B, H, N, C = scores.shape
    slots = scores.new_empty(B, H, C, min(most, N), dtype=torch.int64)
    return slots, scores.new_empty(B, H, N, dtype=torch.int64)


@torch.library.custom_op("subquad::by_bucket", mutates_args=(), device_types="cpu")
def by_bucket(labels: Tensor, buckets: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `subquad.ops.buckets.by_bucket` before it cuts blocks off, and how many blocks each head uses."""
    labels = labels.contiguous()
    outputs = _blocks(labels, buckets, size)
    B, H, N = labels.shape
    axes = interface.Sizes(B, H, H, N, N, 1, 1, buckets, size, 0, 0, interface.threads(32 * labels.numel()))
    interface.run("bucket_blocks", interface.Blocking(axes, pointer(labels), *(pointer(x) for x in outputs)))
    return outputs


@by_bucket.register_fake
def _(labels: Tensor, buckets: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    return _blocks(labels, buckets, size)


def _blocks(labels: Tensor, buckets: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    B, H, N = labels.shape
    blocks = -(-N // size) + buckets
    return (
        labels.new_empty(B, H, blocks, size),
        labels.new_empty(B, H, blocks),
        labels.new_empty(B, H),
    )
