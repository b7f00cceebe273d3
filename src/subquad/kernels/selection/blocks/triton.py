"""Tokens sorted by label into blocks on GPUs: torch's own sort, over short numbers, and no number that is read back."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.selection.blocks.op import label_blocks, sorted_blocks
from subquad.kernels.triton import refusal_of_any_dtype
from subquad.kernels.triton.groups import group_order


@sorted_blocks.refusal("triton")
def refusal(x: Any) -> str | None:
    """The reason why the backend cannot take these labels; None if it can."""
    return refusal_of_any_dtype(x.labels)


@label_blocks.on("triton")
def compute(outputs: tuple[Tensor, Tensor, Tensor], x: Any) -> None:
    """The Triton backend of `sorted_blocks`: each label's blocks follow those of the labels before it."""
    (tokens, bucket, used), (B, H, N) = outputs, x.labels.shape
    T, device = bucket.shape[2], x.labels.device
    order, offsets = group_order(x.labels, x.buckets)
    last_block = ((offsets.diff(dim=-1) + x.size - 1) // x.size).cumsum(-1, dtype=torch.int32)
    used.copy_(last_block[..., -1])

    # The bucket of a block is how many labels end before it.
    block = torch.arange(T, dtype=torch.int32, device=device).expand(B, H, T).contiguous()
    of_block = torch.searchsorted(last_block, block, right=True)
    bucket.copy_(of_block.clamp(max=x.buckets - 1))

    # A slot's place in the order: where its label begins there, and how far the slot is behind its label's first.
    first_block = torch.nn.functional.pad(last_block, (1, 0))
    begin, end = (offsets.gather(2, (of_block + more).clamp(max=x.buckets)) for more in (0, 1))
    behind = (block - first_block.gather(2, of_block)) * x.size
    position = (begin + behind)[..., None] + torch.arange(x.size, device=device)
    filled = position < end[..., None]
    if N == 0:
        tokens.fill_(N)
    else:
        position = position.clamp(max=N - 1).flatten(2)
        tokens.copy_(torch.where(filled, order.gather(2, position).view(tokens.shape), N))
