"""The memory layout of tensors, and labels as tensors of classes."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def token_major(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty (B,H,N,width) that lies in memory as (B,N,H,width): models merge the heads without a copy."""
    B, H, N, _ = like.shape
    return like.new_empty(B, N, H, width, dtype=dtype).transpose(1, 2)


def one_hot(labels: Int[Tensor, "*axes"], classes: int) -> Bool[Tensor, "*axes {classes}"]:
    """torch's `one_hot` as a bool, computed without reading a number, which transforms do not allow.

    >>> one_hot(torch.tensor([2, 0]), 3).int()
    tensor([[0, 0, 1],
            [1, 0, 0]], dtype=torch.int32)
    """
    return labels[..., None] == torch.arange(classes, device=labels.device)


def differentiated(*tensors: Tensor) -> bool:
    """True if autograd records what is computed from these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
