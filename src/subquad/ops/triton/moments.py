"""Means, variances and covariances of each head's vectors on GPUs, in fp32 and without a wide copy of the vectors.

A kernel reads vectors as y = f·x − μ, in registers. The factor f is a power of two, so that the product is exact and
squares of large numbers do not overflow. The vectors are read three times: for the largest number, which gives f; for
μ; and for the variance, with what rounding has left in μ. A program sums up one run of tokens; runs are added in fp64.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from subquad.ops.triton.launch import dot, launch, load_rows, padded, rows, strides
from subquad.ops.triton.recording import Work

RUN = 256  # tokens of a program
TILE = 2048  # numbers of a tile of vectors
RUNS = 32  # of a covariance at most: each is a matrix
BLOCK = 64  # rows and columns of a covariance that one program makes


@dataclass(frozen=True)
class Moments:
    """How each head's real vectors are spread; all numbers are those of y = factor·x."""

    factor: Float32[Tensor, "B H"]
    mean: Float32[Tensor, "B H D"] | None = None
    variance: Float32[Tensor, "B H"] | None = None  # over all components

    def arguments(self) -> dict[str, Any]:
        """What `load_centred` reads, by name."""
        return {"factor": self.factor, "mean": self.mean}


def moments(x: Float[Tensor, "B H N D"], real: Bool[Tensor, "B N"] | None) -> Moments:
    """The moments of each head's real vectors; 0 where there are none."""
    x, (B, H, N, D), count = rows(x), x.shape, counts(x, real)
    largest, _, _ = _sums(x, real, None)
    # At least 10⁻³⁰, so that the factor of vectors of zeros is finite.
    factor = (-largest.amax(2).clamp(min=1e-30).log2().ceil()).exp2() if N else largest.new_ones(B, H)
    _, sums, _ = _sums(x, real, Moments(factor))
    mean = (sums.sum(2, dtype=torch.float64) / count[..., None]).float()
    _, sums, squares = _sums(x, real, Moments(factor, mean))
    rest = sums.sum(2, dtype=torch.float64) / count[..., None]
    variance = squares.sum(2, dtype=torch.float64) / (count * D) - rest.square().mean(-1)
    return Moments(factor, (mean + rest).float(), variance.clamp(min=0).float())


def covariance(
    x: Float[Tensor, "B H N D"], real: Bool[Tensor, "B N"] | None, of: Moments
) -> Float32[Tensor, "B H D D"]:
    """The covariance of each head's real vectors, times factor²."""
    x, (B, H, N, D), tokens, edge = rows(x), x.shape, 32, min(BLOCK, padded(x.shape[3]))
    length = triton.cdiv(max(RUN, triton.cdiv(N, RUNS)), tokens) * tokens
    runs, blocks = triton.cdiv(N, length), triton.cdiv(D, edge)
    products = x.new_empty(B, H, runs, D, D, dtype=torch.float32)
    launch(
        products_of_run,
        (runs, B * H, blocks * blocks),
        work=Work(B * H * N * D * D, B * H * N * D * blocks * x.element_size() + 4 * products.numel()),
        x=x,
        **strides("x", x),
        **of.arguments(),
        real=_stored(real),
        products=products,
        H=H,
        N=N,
        D=D,
        length=length,
        runs=runs,
        TOKENS=tokens,
        EDGE=edge,
    )
    return products.sum(2) / counts(x, real)[..., None, None].float()


def counts(x: Float[Tensor, "B H N D"], real: Bool[Tensor, "B N"] | None) -> Float[Tensor, "#B 1"]:
    """How many real vectors each item has, at least 1, in fp64."""
    if real is None:
        return torch.full((1, 1), max(1, x.shape[2]), dtype=torch.float64, device=x.device)
    return real.sum(1, keepdim=True).clamp(min=1).double()


def _sums(x: Tensor, real: Tensor | None, of: Moments | None) -> tuple[Tensor, Tensor, Tensor]:
    """The largest number of each run, (B,H,runs), the sum of y by component, and that of all squares."""
    (B, H, N, D), width = x.shape, padded(x.shape[3])
    runs = triton.cdiv(N, RUN)
    largest, squares = x.new_empty(2, B, H, runs, dtype=torch.float32)
    sums = x.new_empty(B, H, runs, D, dtype=torch.float32)
    given: dict[str, Any] = {"factor": None, "mean": None} if of is None else of.arguments()
    launch(
        sums_of_run,
        (runs, B * H),
        work=Work(bytes=B * H * N * D * x.element_size()),
        x=x,
        **strides("x", x),
        **given,
        real=_stored(real),
        largest=largest,
        sums=sums,
        squares=squares,
        H=H,
        N=N,
        D=D,
        runs=runs,
        WIDTH=width,
        RUN=RUN,
        TOKENS=max(16, TILE // width),
    )
    return largest, sums, squares


def _stored(real: Tensor | None) -> Tensor | None:
    return None if real is None else real.contiguous()


@triton.jit
def load_centred(x, x_n, token, there, factor, mean, head, start, D, WIDTH: tl.constexpr):
    """The components from `start` on of y = factor·x − mean in fp32, (tokens, WIDTH); 0 where nothing is there."""
    y = load_rows(x + start, x_n, token, there, D - start, WIDTH).to(tl.float32)
    if factor is not None:
        y *= tl.load(factor + head)
    if mean is not None:
        column = start + tl.arange(0, WIDTH)
        shift = tl.load(mean + head * D + column, mask=column < D, other=0.0)
        y = tl.where(there[:, None], y - shift[None, :], 0.0)
    return y


@triton.jit
def load_there(real, item, token, N):
    """Which of these tokens are real."""
    there = token < N
    if real is not None:
        there = tl.load(real + item * N + token, mask=there, other=0) != 0
    return there


@triton.jit
def sums_of_run(
    x,
    x_b,
    x_h,
    x_n,
    factor,
    mean,
    real,
    largest,
    sums,
    squares,
    H,
    N,
    D,
    runs,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """max |y|, Σ y and Σ ‖y‖² over the real tokens of a run. One program takes one run of a head."""
    head, run = tl.program_id(1).to(tl.int64), tl.program_id(0)
    x += head // H * x_b + head % H * x_h
    most, total, square = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
    for first in range(run * RUN, min(N, (run + 1) * RUN), TOKENS):
        token = first + tl.arange(0, TOKENS)
        there = load_there(real, head // H, token, N)
        y = load_centred(x, x_n, token, there, factor, mean, head, 0, D, WIDTH)
        most = tl.maximum(most, tl.max(tl.abs(y), 0))
        total += tl.sum(y, 0)
        square += tl.sum(y * y, 0)
    column = tl.arange(0, WIDTH)
    tl.store(sums + (head * runs + run) * D + column, total, mask=column < D)
    tl.store(largest + head * runs + run, tl.max(most, 0))
    tl.store(squares + head * runs + run, tl.sum(square, 0))


@triton.jit
def products_of_run(
    x,
    x_b,
    x_h,
    x_n,
    factor,
    mean,
    real,
    products,
    H,
    N,
    D,
    length,
    runs,
    TOKENS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Σ y yᵀ over the real tokens of a run. One program takes one run of a head, and one block of the matrix."""
    head, run = tl.program_id(1).to(tl.int64), tl.program_id(0)
    blocks = tl.cdiv(D, EDGE)
    row, column = tl.program_id(2) // blocks * EDGE, tl.program_id(2) % blocks * EDGE
    x += head // H * x_b + head % H * x_h
    total = tl.zeros((EDGE, EDGE), tl.float32)
    for first in range(run * length, min(N, (run + 1) * length), TOKENS):
        token = first + tl.arange(0, TOKENS)
        there = load_there(real, head // H, token, N)
        left = load_centred(x, x_n, token, there, factor, mean, head, row, D, EDGE)
        total += dot(tl.trans(left), load_centred(x, x_n, token, there, factor, mean, head, column, D, EDGE))
    row, column = row + tl.arange(0, EDGE), column + tl.arange(0, EDGE)
    places = products + ((head * runs + run) * D + row)[:, None] * D + column[None, :]
    tl.store(places, total, mask=(row < D)[:, None] & (column < D)[None, :])
