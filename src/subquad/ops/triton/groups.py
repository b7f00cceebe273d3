"""Tokens by group on GPUs: their order by label, and the sums and means of groups, without atomics.

Sums run over *sorted* tokens. A group of any size is cut into chunks, so that one large group is not one slow program:

    order     [ group 0 ········ | group 1 · | group 3 ··············· | padding ··· ]
    chunks    [ 0      | 1       | 2         | 3      | 4      | 5     ]
    sums        chunk 0 + chunk 1   chunk 2    chunk 3 + chunk 4 + chunk 5             in this order, always

There are at most C + ⌊N / CHUNK⌋ chunks, which is known without reading a label.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from subquad.ops.triton.launch import launch, load_rows, padded, rows, strides
from subquad.ops.triton.recording import Work

CHUNK = 128  # tokens that one program sums up
TILE = 4096  # numbers of a tile of vectors


def group_order(labels: Int64[Tensor, "B H N"], groups: int) -> tuple[Int32[Tensor, "B H N"], Int32[Tensor, "B H C1"]]:
    """The tokens sorted by label, equal ones in their order, and where each of the groups begins there.

    The members of group c are `order[offsets[c] : offsets[c + 1]]`. Tokens with labels outside of [0, groups), such as
    padding, are in none.
    """
    # Sorting is by digits, and short numbers have fewer of them.
    kind = torch.int16 if groups < torch.iinfo(torch.int16).max else torch.int32
    ascending, order = labels.clamp(-1, groups).to(kind).sort(dim=-1, stable=True)
    firsts = torch.arange(groups + 1, dtype=kind, device=labels.device).expand(*labels.shape[:2], -1).contiguous()
    return order.to(torch.int32), torch.searchsorted(ascending, firsts, out_int32=True)


def group_means(
    x: Float[Tensor, "B H N D"], order: Int32[Tensor, "B H N"], offsets: Int32[Tensor, "B H C1"]
) -> Float[Tensor, "B H C D"]:
    """The mean of each group's vectors in fp32; 0 for an empty group."""
    return group_sums(x, order, offsets) / offsets.diff(dim=-1).clamp(min=1)[..., None]


def group_sums(
    x: Float[Tensor, "B H N D"], order: Int32[Tensor, "B H N"], offsets: Int32[Tensor, "B H C1"]
) -> Float[Tensor, "B H C D"]:
    """The sum of each group's vectors in fp32; 0 for an empty group."""
    x, (B, H, N, D), C, width = rows(x), x.shape, offsets.shape[2] - 1, padded(x.shape[3])
    most = C + N // CHUNK
    chunks, of_chunk = _chunks(offsets, most)
    partial = x.new_empty(B, H, most, D, dtype=torch.float32)
    sums = x.new_empty(B, H, C, D, dtype=torch.float32)
    sizes: dict[str, Any] = {"C": C, "D": D, "WIDTH": width, "most": most}
    launch(
        sum_of_chunk,
        (most, B * H),
        work=Work(bytes=B * H * N * (D * x.element_size() + 4) + 4 * partial.numel()),
        x=x,
        **strides("x", x),
        order=order,
        offsets=offsets,
        chunks=chunks,
        of_chunk=of_chunk,
        partial=partial,
        H=H,
        N=N,
        **sizes,
        CHUNK=CHUNK,
        ROWS=max(16, TILE // width),
    )
    launch(
        sum_of_group,
        (C, B * H),
        num_warps=1,
        work=Work(bytes=4 * (partial.numel() + sums.numel())),
        partial=partial,
        chunks=chunks,
        sums=sums,
        **sizes,
    )
    return sums


def _chunks(offsets: Int32[Tensor, "B H C1"], most: int) -> tuple[Int32[Tensor, "B H C1"], Int32[Tensor, "B H {most}"]]:
    """How many chunks stand before each group, and the group of each chunk, C behind the last one."""
    counts = (offsets.diff(dim=-1) + CHUNK - 1) // CHUNK
    before = torch.nn.functional.pad(counts, (1, 0)).cumsum(-1, dtype=torch.int32)
    chunk = torch.arange(most, dtype=torch.int32, device=offsets.device).expand(*offsets.shape[:2], most).contiguous()
    return before, torch.searchsorted(before[..., 1:].contiguous(), chunk, right=True, out_int32=True)


@triton.jit
def sum_of_chunk(
    x,
    x_b,
    x_h,
    x_n,
    order,
    offsets,
    chunks,
    of_chunk,
    partial,
    H,
    N,
    C,
    D,
    most,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """partial[chunk] = Σ x over the chunk's tokens. One program takes one chunk of a head."""
    head, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    group = tl.load(of_chunk + head * most + chunk)
    if group < C:  # else there are fewer chunks
        offsets += head * (C + 1) + group
        start = tl.load(offsets) + (chunk - tl.load(chunks + head * (C + 1) + group)) * CHUNK
        end = tl.minimum(start + CHUNK, tl.load(offsets + 1))
        x += head // H * x_b + head % H * x_h
        total = tl.zeros((WIDTH,), tl.float32)
        for first in range(start, end, ROWS):
            place = first + tl.arange(0, ROWS)
            token = tl.load(order + head * N + place, mask=place < end, other=0)
            total += tl.sum(load_rows(x, x_n, token, place < end, D, WIDTH).to(tl.float32), 0)
        column = tl.arange(0, WIDTH)
        tl.store(partial + (head * most + chunk) * D + column, total, mask=column < D)


@triton.jit
def sum_of_group(partial, chunks, sums, C, D, most, WIDTH: tl.constexpr):
    """sums[group] = Σ partial over the group's chunks, first to last. One program takes one group of a head."""
    head, group = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = tl.arange(0, WIDTH)
    chunks += head * (C + 1) + group
    total = tl.zeros((WIDTH,), tl.float32)
    for chunk in range(tl.load(chunks), tl.load(chunks + 1)):
        total += tl.load(partial + (head * most + chunk) * D + column, mask=column < D, other=0.0)
    tl.store(sums + (head * C + group) * D + column, total, mask=column < D)
