"""Conversion of 16-bit numbers to wider ones."""

import torch
from torch import Tensor


def upcast(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors in fp32, or in fp64 if they are."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]
