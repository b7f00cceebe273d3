"""Tokens by group: means, and the sorted form of dense blocks that each belong to one group."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor


def group_mean(x: Float[Tensor, "B H N D"], labels: Int64[Tensor, "B H N"], groups: int) -> Float[Tensor, "B H C D"]:
    """Mean of each group's members, in x's dtype; 0 for an empty group. Labels of `groups` are in none."""
    B, H, _, D = x.shape
    totals = x.new_zeros(B, H, groups + 1, D)
    totals = totals.scatter_add(2, labels[..., None].expand_as(x), x)
    return totals[:, :, :groups] / group_sizes(labels, groups).clamp(min=1)[..., None]


def group_sizes(labels: Int64[Tensor, "B H N"], groups: int) -> Int64[Tensor, "B H C"]:
    """How many members each group has."""
    counts = labels.new_zeros(*labels.shape[:2], groups + 1)
    return counts.scatter_add(2, labels, torch.ones_like(labels))[..., :groups]


def broadcast(of_group: Float[Tensor, "B H C E"], labels: Int64[Tensor, "B H N"]) -> Float[Tensor, "B H N E"]:
    """Hand every member its group's row; 0 to those in no group."""
    B, H, _, E = of_group.shape
    rows = torch.cat([of_group, of_group.new_zeros(B, H, 1, E)], dim=2)
    return rows.gather(2, labels[..., None].expand(*labels.shape, E))


@dataclass(frozen=True)
class Blocks:
    """A sorted layout: T = blocks × size slots, where every block holds members of one group only."""

    slot: Int64[Tensor, "B H N"]  # of each token; T for those in no group
    group: Int64[Tensor, "B H blocks"]  # of each block; unused blocks repeat the last group
    size: int

    def gather(self, x: Shaped[Tensor, "B H N D"]) -> Shaped[Tensor, "B H blocks size D"]:
        """Move tokens to their slots; empty slots hold 0."""
        B, H, N, D = x.shape
        blocks = self.group.shape[2]
        slots = x.new_zeros(B, H, blocks * self.size + 1, D)
        slots = slots.scatter(2, self.slot[..., None].expand(B, H, N, D), x)
        return slots[:, :, :-1].unflatten(2, (blocks, self.size))

    def scatter(self, y: Shaped[Tensor, "B H blocks size E"]) -> Shaped[Tensor, "B H N E"]:
        """Move slots back to their tokens; tokens in no group get 0."""
        return broadcast(y.flatten(2, 3), self.slot)

    def of_group(self, x: Shaped[Tensor, "B H C K D"]) -> Shaped[Tensor, "B H blocks K D"]:
        """For every block its group's K rows."""
        return x.gather(2, self.group[..., None, None].expand(*self.group.shape, *x.shape[3:]))


def sort_into_blocks(labels: Int64[Tensor, "B H N"], groups: int, size: int) -> Blocks:
    """Sort tokens by group (stably) into blocks of `size` slots, each group starting a new block.

    The shapes are static: ⌈N/size⌉ + groups blocks, enough for any labels.
    """
    N = labels.shape[2]
    blocks = -(-N // size) + groups
    counts = group_sizes(labels, groups)
    used = (counts + size - 1) // size
    last_block = used.cumsum(-1)
    first_token = _append_zero(counts.cumsum(-1) - counts)
    first_slot = _append_zero((last_block - used) * size)

    # By numbers that differ, as a stable sort would: ONNX has none.
    order = (labels * N + torch.arange(N, device=labels.device)).argsort(dim=-1)
    ordered = labels.gather(2, order)
    rank = torch.arange(N, device=labels.device) - first_token.gather(2, ordered)
    slot = torch.where(ordered == groups, blocks * size, first_slot.gather(2, ordered) + rank)
    # The group of a block is how many groups end before it.
    ended = torch.zeros_like(labels[..., :1]).expand(*labels.shape[:2], blocks + 1)
    group = ended.scatter_add(2, last_block, torch.ones_like(last_block)).cumsum(-1)[..., :blocks]
    return Blocks(torch.empty_like(slot).scatter(2, order, slot), group.clamp(max=groups - 1), size)


def _append_zero(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros_like(x[..., :1])], dim=-1)
