"""Tokens sorted by group, cut into blocks of one group each: the work of one program."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupBlocks:
    """Blocks of up to `size` tokens of one group, T = ⌈N/size⌉ + groups of them, enough for any sizes of groups.

        order    [ 4 0 9 │ 7 2 │ · · ]      tokens by group
        group      0 0     1                of each block; the number of groups where a block is empty
        start      0 2     3                where in `order` it begins

    Attributes:
        group: (B,H,T) int32.
        start: (B,H,T) int32.
        stop: (B,H,T) int32, where its tokens end.
        size: the most tokens of a block.
    """

    group: Tensor
    start: Tensor
    stop: Tensor
    size: int

    @property
    def count(self) -> int:
        """T, the number of blocks of a head."""
        return self.group.shape[2]


def group_blocks(offsets: Tensor, tokens: int, size: int) -> GroupBlocks:
    """Cut groups whose tokens lie between their `offsets`, (B,H,groups+1), into blocks."""
    groups = offsets.shape[2] - 1
    used = (offsets[..., 1:] - offsets[..., :-1] + size - 1) // size
    last = used.cumsum(-1)
    blocks = torch.arange(-(-tokens // size) + groups, device=offsets.device)
    group = torch.searchsorted(last, blocks.expand(*last.shape[:2], -1).contiguous(), right=True)
    of_block = group.clamp(max=groups - 1)
    start = offsets.gather(2, of_block) + (blocks - (last - used).gather(2, of_block)) * size
    stop = torch.minimum(start + size, offsets.gather(2, of_block + 1))
    empty = group == groups
    start, stop = start.masked_fill(empty, 0), stop.masked_fill(empty, 0)
    return GroupBlocks(group.int(), start.int(), stop.int(), size)
