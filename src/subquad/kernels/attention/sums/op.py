"""The op `group_sums`."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.sums import reference
from subquad.kernels.dispatch import Op
from subquad.kernels.selection.group_means import broadcast

group_sums = Op(reference.group_sums)


@group_sums.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend."""
    sums, sizes = sums_and_sizes.run(backend, *x)
    return sums, sizes


@group_sums.operator("x", "labels", "groups")
def sums_and_sizes(x: Any) -> tuple[Tensor, Tensor]:
    """Allocate both."""
    (B, H, _, D), groups = x.x.shape, x.groups
    return x.x.new_empty(B, H, groups, D, dtype=torch.float32), x.labels.new_empty(B, H, groups)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    _, x, labels, groups = inputs
    ctx.save_for_backward(labels)
    ctx.groups, ctx.dtype = groups, x.dtype
    ctx.mark_non_differentiable(output[1])


def _of_members(ctx: Any, grad: Tensor, _: Any) -> tuple[None, Tensor, None, None]:
    """Each member's gradient is that of its group's sum."""
    (labels,) = ctx.saved_tensors
    labels = torch.where((labels < 0) | (labels > ctx.groups), ctx.groups, labels)
    return None, broadcast(grad, labels).to(ctx.dtype), None, None


sums_and_sizes.gradient(_of_members, _save)
