"""The memory layout of tensors."""

import torch
from torch import Tensor


def token_major(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty (B,H,N,width) that lies in memory as (B,N,H,width): models merge the heads without a copy."""
    B, H, N, _ = like.shape
    return like.new_empty(B, N, H, width, dtype=dtype).transpose(1, 2)


def differentiated(*tensors: Tensor) -> bool:
    """Whether autograd records what is computed from these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
