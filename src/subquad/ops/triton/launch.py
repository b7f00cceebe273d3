"""How kernels are launched, and small functions that several of them call."""

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import target_info

from subquad.ops.triton.recording import Launch, Work, recorded

PROGRAMS = 512  # into which work over runs of tokens is divided: several for each multiprocessor


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *,
    num_warps: Any = 4,
    num_stages: Any = 2,
    work: Any = None,
    **arguments: Any,
) -> None:
    """Run a kernel with a grid of programs, or write the launch down inside `recording`.

    `num_warps` and `num_stages` are numbers and `work` is a `Work`: no type says so, because the checker takes any
    dictionary of arguments for them, too.

    A grid without programs is skipped. Arguments go by name; tensors as they are, of any strides.
    """
    if 0 in grid:
        return
    launches = recorded()
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if launches is not None:
        launches.append(Launch.of(kernel, grid, arguments, options, work or Work()))
        return
    device = next(x.device for x in arguments.values() if isinstance(x, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](**arguments, **options)


def padded(width: int) -> int:
    """The power of two, at least 16, into which a width fits: what a product of tiles takes."""
    return max(16, triton.next_power_of_2(width))


def tile(size: int, most: int) -> int:
    """The edge of a tile for `size` rows: a power of two from 16 to `most`."""
    return min(most, padded(size))


def runs_of(tokens: int, step: int, others: int, most: int = PROGRAMS) -> tuple[int, int]:
    """How long the runs are into which tokens are cut, a multiple of `step`, and how many there are: (length, runs).

    With `others` programs for each run there are some PROGRAMS in all, and at most `most` runs.
    """
    steps = max(1, triton.cdiv(tokens, step))
    runs = max(1, min(steps, most, PROGRAMS // max(1, others)))
    length = triton.cdiv(steps, runs) * step
    return length, triton.cdiv(max(1, tokens), length)


def rows(x: Tensor) -> Tensor:
    """The tensor, copied where its vectors do not lie together in memory."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(name: str, x: Tensor) -> dict[str, int]:
    """The steps of a (B,H,N,·) tensor as arguments of a kernel: `name_b`, `name_h` and `name_n`."""
    return {f"{name}_{axis}": step for axis, step in zip("bhn", x.stride(), strict=False)}


@triton.jit
def load_rows(x, stride, row, there, width, WIDTH: tl.constexpr):
    """The vectors of these rows, (rows, WIDTH); 0 for rows that are not there and behind the vectors' width."""
    column = tl.arange(0, WIDTH)
    pointers = x + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(pointers, mask=there[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def store_rows(x, stride, row, there, values, width, WIDTH: tl.constexpr):
    """Store (rows, WIDTH) values as the vectors of these rows, in x's dtype."""
    column = tl.arange(0, WIDTH)
    pointers = x + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(pointers, values.to(x.dtype.element_ty), mask=there[:, None] & (column < width)[None, :])


@triton.jit
def dot(a, b):
    """a·b in fp32, on tensor cores: numbers of 16 bits as they are, fp32 as three products in TF32 (not as one)."""
    precision: tl.constexpr = "ieee" if target_info.is_hip() else "tf32x3"  # matrix cores of AMD take fp32 as it is
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def dot_wide(weights, x):
    """weights·x for fp32 weights: numbers of 16 bits meet weights rounded to their own kind."""
    return dot(weights.to(x.dtype), x)


@triton.jit
def seen_exponentials(logits, seen, largest):
    """One step of an online softmax: (the largest logits so far, what scales earlier sums, the new weights).

    A row that has seen nothing keeps −∞ and weights of 0.
    """
    logits = tl.where(seen, logits, float("-inf"))
    new = tl.maximum(largest, tl.max(logits, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    return new, tl.exp(largest - safe), tl.exp(logits - safe[:, None])
