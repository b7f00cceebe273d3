"""Tokens by group: means, sizes, and what a group hands to its members."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def group_mean(x: Float[Tensor, "B H N D"], labels: Int64[Tensor, "B H N"], groups: int) -> Float[Tensor, "B H C D"]:
    """Mean of each group's members, in x's dtype; 0 for an empty group. Labels of `groups` are in none."""
    B, H, _, D = x.shape
    totals = x.new_zeros(B, H, groups + 1, D)
    totals = totals.scatter_add(2, labels[..., None].expand_as(x), x)
    return totals[:, :, :groups] / group_sizes(labels, groups).clamp(min=1)[..., None]


def group_sizes(labels: Int64[Tensor, "B H N"], groups: int) -> Int64[Tensor, "B H C"]:
    """The number of members of each group."""
    counts = labels.new_zeros(*labels.shape[:2], groups + 1)
    return counts.scatter_add(2, labels, torch.ones_like(labels))[..., :groups]


def broadcast(of_group: Float[Tensor, "B H C E"], labels: Int64[Tensor, "B H N"]) -> Float[Tensor, "B H N E"]:
    """Hand every member its group's row; 0 to those in no group, with the label C. Token-major, as compiled outputs."""
    (B, H, C, E), N = of_group.shape, labels.shape[2]
    rows = torch.cat([of_group, of_group.new_zeros(B, H, 1, E)], dim=2).view(B * H * (C + 1), E)
    first = torch.arange(B * H, device=labels.device).view(B, 1, H) * (C + 1)
    members = rows.index_select(0, (first + labels.transpose(1, 2)).reshape(-1))  # whole rows: faster than `gather`
    return members.view(B, N, H, E).transpose(1, 2)
