"""Numbers of 16 bits: where they are widened."""

import torch
from torch import Tensor


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in fp32, or in fp64 where they are."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]
