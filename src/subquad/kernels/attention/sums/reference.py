"""Sums of groups in plain PyTorch."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.kernels.precision import upcast
from subquad.kernels.selection.group_means import group_sizes


def group_sums(
    x: Float[Tensor, "B H N D"], labels: Int64[Tensor, "B H N"], groups: int
) -> tuple[Float[Tensor, "B H {groups} D"], Int64[Tensor, "B H {groups}"]]:
    """The sum of each group's vectors, in fp32 or better, and how many there are. Any other label is in no group."""
    x = upcast(x)[0]
    labels = torch.where((labels < 0) | (labels > groups), groups, labels)
    sums = x.new_zeros(*x.shape[:2], groups + 1, x.shape[3])
    sums = sums.scatter_add(2, labels.unsqueeze(-1).expand_as(x), x)[:, :, :groups]
    return sums, group_sizes(labels, groups)
