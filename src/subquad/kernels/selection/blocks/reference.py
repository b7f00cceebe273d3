"""Tokens sorted by label into blocks, in plain PyTorch."""

from dataclasses import dataclass

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from subquad.core.rounding import ceil_div
from subquad.kernels.selection.group_means import broadcast, group_sizes


def sorted_blocks(
    labels: Int64[Tensor, "B H N"], buckets: int, size: int
) -> tuple[Int64[Tensor, "B H T S"], Int64[Tensor, "B H T"], Int64[Tensor, "B H"]]:
    """All blocks of `by_bucket`, ⌈N/size⌉ + buckets, and how many of them each head uses."""
    N = labels.shape[2]
    blocks = sort_into_blocks(labels, buckets, size)
    numbers = torch.arange(1, N + 1, device=labels.device).expand_as(labels)[..., None]
    tokens = blocks.gather(numbers)[..., 0] - 1
    tokens = torch.where(tokens < 0, N, tokens)
    return tokens, blocks.group, (tokens < N).any(3).sum(2)


@dataclass(frozen=True)
class Blocks:
    """A sorted layout: T = blocks × size slots, where every block holds members of one group only."""

    slot: Int64[Tensor, "B H N"]  # the slot of each token; T for those in no group
    group: Int64[Tensor, "B H blocks"]  # the group of each block; unused blocks repeat the last one
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
    blocks = ceil_div(N, size) + groups
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
    ended = torch.zeros_like(last_block[..., :1]).expand(*labels.shape[:2], blocks + 1)
    group = ended.scatter_add(2, last_block, torch.ones_like(last_block)).cumsum(-1)[..., :blocks]
    return Blocks(torch.empty_like(slot).scatter(2, order, slot), group.clamp(max=groups - 1), size)


def _append_zero(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros_like(x[..., :1])], dim=-1)
