"""Tokens sorted by group, cut into blocks of one group each: the work of one program."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import kernel, launch, padded
from subquad.kernels.triton.recording import LaunchCost

BLOCKS = 32  # that one program looks up


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
    """

    group: Tensor
    start: Tensor
    stop: Tensor

    @property
    def count(self) -> int:
        """T, the number of blocks of a head."""
        return self.group.shape[2]


def group_blocks(offsets: Tensor, tokens: int, size: int, with_remaining: bool = False) -> GroupBlocks:
    """Cut groups whose tokens lie between their `offsets`, (B,H,groups+1) int32, into blocks.

    With `with_remaining` the tokens behind the last offset, which are in no group, are one more group.
    """
    (B, H, known), groups = offsets.shape, offsets.shape[2] - (0 if with_remaining else 1)
    count = -(-tokens // size) + groups
    lists = GroupBlocks(*offsets.new_empty(3, B, H, count, dtype=torch.int32))
    launch(
        cut_groups,
        (triton.cdiv(count, BLOCKS), B * H),
        cost=LaunchCost(bytes=12 * lists.group.numel() + 4 * offsets.numel()),
        offsets=offsets.contiguous(),
        group=lists.group,
        start=lists.start,
        stop=lists.stop,
        tokens=tokens,
        known=known - 1,
        groups=groups,
        count=count,
        size=size,
        GROUPS=padded(groups),
        BLOCKS=BLOCKS,
    )
    return lists


@kernel
def cut_groups(
    offsets, group, start, stop, tokens, known, groups, count, size, GROUPS: tl.constexpr, BLOCKS: tl.constexpr
):
    """The group of each block is how many groups end at blocks before it or at itself."""
    head = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, GROUPS)
    offsets += head * (known + 1)
    first = tl.load(offsets + c, mask=c < groups, other=0)
    end = tl.load(offsets + c + 1, mask=c < known, other=tokens)
    used = tl.where(c < groups, (end - first + size - 1) // size, 0)
    last = tl.where(c < groups, tl.cumsum(used, 0), 2147483647)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    of_block = tl.sum((last[None, :] <= block[:, None]).to(tl.int32), 1)
    mine = c[None, :] == of_block[:, None]
    begin = tl.sum(tl.where(mine, (first - (last - used) * size)[None, :], 0), 1) + block * size
    finish = tl.minimum(begin + size, tl.sum(tl.where(mine, end[None, :], 0), 1))
    present = of_block < groups
    block_index = head * count + block
    tl.store(group + block_index, of_block, mask=block < count)
    tl.store(start + block_index, tl.where(present, begin, 0), mask=block < count)
    tl.store(stop + block_index, tl.where(present, finish, 0), mask=block < count)
