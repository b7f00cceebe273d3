"""The op `group_sums`."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.ops.backends import Op, Operator
from subquad.ops.groups import broadcast
from subquad.ops.parts.sums import reference


@Op
def group_sums(
    x: Float[Tensor, "B H N D"], labels: Int64[Tensor, "B H N"], groups: int
) -> tuple[Float[Tensor, "B H {groups} D"], Int64[Tensor, "B H {groups}"]]:
    """The sum of each group's vectors, in fp32 or better, and how many there are. Any other label is in no group."""
    return reference.group_sums(x, labels, groups)


@group_sums.compiled
def _(backend: str, x: Tensor, labels: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    return sums_and_sizes(backend, x, labels, groups)


@Operator
def sums_and_sizes(x: Tensor, labels: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Allocate both."""
    B, H, _, D = x.shape
    return x.new_empty(B, H, groups, D, dtype=torch.float32), labels.new_empty(B, H, groups)


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
