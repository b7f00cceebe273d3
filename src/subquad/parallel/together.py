"""Several tensors in one exchange."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from subquad.parallel.collectives import gather


def gather_together(tensors: Sequence[Tensor], group: Any) -> list[list[Tensor]]:
    """What every rank has of each, in their order; tensors of one dtype, and of the same shapes on all ranks."""
    both = torch.cat([x.reshape(-1) for x in tensors])
    every = gather(both, [both.shape] * dist.get_world_size(group), group)
    sizes = [x.numel() for x in tensors]
    return [[part.view_as(x) for part, x in zip(one.split(sizes), tensors, strict=True)] for one in every]


def add_together(tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
    """The sum of each over all ranks, in their order, so that each rank has the same. Differentiable."""
    both = torch.cat([x.reshape(-1) for x in tensors])
    total, *others = gather(both, [both.shape] * dist.get_world_size(group), group)
    for other in others:
        total = total + other
    sizes = [x.numel() for x in tensors]
    return [part.view_as(x) for part, x in zip(total.split(sizes), tensors, strict=True)]
