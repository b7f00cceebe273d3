"""Numbers of 16 bits: where they are widened."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """The tensor in fp32; in fp64 where it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
