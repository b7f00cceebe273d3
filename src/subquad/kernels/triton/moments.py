"""Means and variances of each head's vectors on GPUs, in fp32 and without a wide copy of the vectors.

A kernel reads vectors as y = f·x − μ, in registers. The factor f is a power of two, so that the product is exact and
squares of large numbers do not overflow. Each run of tokens has moments of its own, with its own factor; the program
sweeps it three times, for the largest number, which gives f; for μ; and for the variance, with what rounding has left
in μ. The moments of runs are merged in fp64, n_r being the tokens of a run and M_r = Σ ‖y − μ_r‖²:

    f = min f_r,   μ = Σ n_r μ_r / n,   variance = Σ (M_r + n_r ‖μ_r − μ‖²) / (n·D)        in units of f
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float32, Float64
from torch import Tensor

from subquad.kernels.triton.launch import launch, load_rows, padded, rows
from subquad.kernels.triton.recording import LaunchCost

RUN = 256  # tokens of a program, or more
TILE = 2048  # numbers of a tile of vectors
RUNS = 32  # of a head at most


@dataclass(frozen=True)
class Moments:
    """Mean, spread and number of each head's real vectors; all numbers are those of y = factor·x."""

    factor: Float32[Tensor, "B H"]
    mean: Float32[Tensor, "B H D"]
    variance: Float32[Tensor, "B H"]  # over all components
    count: Float32[Tensor, "B H"]  # number of real vectors, at least 1

    def arguments(self) -> dict[str, Tensor]:
        """The arguments of `load_centred`, by name."""
        return {"factor": self.factor, "mean": self.mean}


def moments(x: Float[Tensor, "B H N D"], valid: Bool[Tensor, "B N"] | None) -> Moments:
    """The moments of each head's real vectors; 0 where there are none."""
    return moments_of((x, valid))[0]


def moments_of(*inputs: tuple[Float[Tensor, "B H N D"], Bool[Tensor, "B N"] | None]) -> list[Moments]:
    """The moments of one or two kinds of vectors, each with the tokens that are real, by the same launches."""
    parts = [_Runs.cut(*each) for each in inputs]
    names = dict(zip(("x", "y"), parts, strict=False))
    heads = max(part.heads for part in parts)
    launch(
        moments_of_runs,
        (max(part.runs for part in parts), heads, len(parts)),
        cost=LaunchCost(bytes=sum(part.x.numel() * part.x.element_size() for part in parts)),
        **_named(names, "", "_b", "_h", "_n", "_valid", "_H", "_N", "_TOKENS"),
    )
    launch(
        merge_moments,
        (heads, len(parts)),
        cost=LaunchCost(bytes=sum(8 * part.means.numel() for part in parts)),
        **_named(names, "_merged_factor", "_merged_mean", "_merged_variance", "_merged_count"),
    )
    return [part.merged for part in parts]


@dataclass(frozen=True)
class _Runs:
    """Vectors, and the moments of each run of them, (B,H,runs): factors, Σ 1, Σ ‖y − μ‖²; means (B,H,runs,D)."""

    x: Tensor
    valid: Tensor | None
    length: int
    factors: Tensor
    numbers: Tensor
    squares: Float64[Tensor, "B H R"]
    means: Float64[Tensor, "B H R D"]
    merged: Moments

    @staticmethod
    def cut(x: Tensor, valid: Tensor | None) -> "_Runs":
        x, (B, H, N, D) = rows(x), x.shape
        length = max(RUN, triton.cdiv(triton.cdiv(N, RUNS), RUN) * RUN)
        runs = max(1, triton.cdiv(N, length))
        factors, numbers = x.new_empty(2, B, H, runs, dtype=torch.float32)
        squares, means = (x.new_empty(B, H, runs, *width, dtype=torch.float64) for width in ((), (D,)))
        factor, variance, count = x.new_empty(3, B, H, dtype=torch.float32)
        merged = Moments(factor, x.new_empty(B, H, D, dtype=torch.float32), variance, count)
        return _Runs(x, stored(valid), length, factors, numbers, squares, means, merged)

    @property
    def runs(self) -> int:
        return self.factors.shape[2]

    @property
    def heads(self) -> int:
        return self.x.shape[0] * self.x.shape[1]

    def arguments(self) -> dict[str, Any]:
        """The arguments of the kernels, inputs and outputs."""
        _, H, N, D = self.x.shape
        return {
            **{"": self.x, **{f"_{axis}": step for axis, step in zip("bhn", self.x.stride(), strict=False)}},
            **{"_valid": self.valid, "_H": H, "_N": N, "_TOKENS": max(16, TILE // padded(D))},
            **{"_factors": self.factors, "_numbers": self.numbers, "_squares": self.squares, "_means": self.means},
            **{"_heads": self.heads, "_runs": self.runs, "_length": self.length, "_D": D, "_WIDTH": padded(D)},
            **{f"_merged_{name}": x for name, x in vars(self.merged).items()},
        }


OF_RUNS = ("_factors", "_numbers", "_squares", "_means", "_heads", "_runs", "_D", "_WIDTH")


def _named(parts: dict[str, _Runs], *of_kernel: str) -> dict[str, Any]:
    """The arguments of both kinds of vectors; None for those of a kind that is not there."""
    what = (*OF_RUNS, *of_kernel, *(("_length",) if "_TOKENS" in of_kernel else ()))
    inputs = {name: part.arguments() for name, part in parts.items()}
    return {f"{name}{each}": inputs[name][each] if name in inputs else None for name in ("x", "y") for each in what}


def stored(valid: Tensor | None) -> Tensor | None:
    """The tokens that are real as the kernels read them."""
    return None if valid is None else valid.contiguous()


@triton.jit
def load_centred(x, x_n, token, present, factor, mean, head, start, D, WIDTH: tl.constexpr):
    """The components from `start` on of y = factor·x − mean in fp32, (tokens, WIDTH); 0 where nothing is there."""
    y = load_rows(x + start, x_n, token, present, D - start, WIDTH).to(tl.float32)
    if factor is not None:
        y *= tl.load(factor + head)
    if mean is not None:
        column = start + tl.arange(0, WIDTH)
        shift = tl.load(mean + head * D + column, mask=column < D, other=0.0)
        y = tl.where(present[:, None], y - shift[None, :], 0.0)
    return y


@triton.jit
def load_present(valid, item, token, N):
    """Load a bool that marks the real tokens among these."""
    present = token < N
    if valid is not None:
        present = tl.load(valid + item * N + token, mask=present, other=0) != 0
    return present


@triton.jit
def factor_of(largest):
    """The power of two that brings a number into [1/2, 1), made from its exponent; at most 2⁹⁹, for numbers near 0."""
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 27)
    return (tl.maximum(253 - exponent, 1) << 23).to(tl.float32, bitcast=True)


@triton.jit
def moments_of_run(
    factors,
    numbers,
    squares,
    means,
    x,
    x_b,
    x_h,
    x_n,
    valid,
    heads,
    runs,
    length,
    H,
    N,
    D,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The moments of the real tokens of one run of a head, if there are that run and that head."""
    head, run = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if (head < heads) & (run < runs):
        x += head // H * x_b + head % H * x_h
        begin, end = run * length, tl.minimum(N, (run + 1) * length)
        most, number = tl.zeros((WIDTH,), tl.float32), tl.zeros((TOKENS,), tl.float32)
        for first in range(begin, end, TOKENS):
            token = first + tl.arange(0, TOKENS)
            present = load_present(valid, head // H, token, N)
            number += present.to(tl.float32)
            most = tl.maximum(most, tl.max(tl.abs(load_rows(x, x_n, token, present, D, WIDTH).to(tl.float32)), 0))
        factor, count = factor_of(tl.max(most, 0)), tl.sum(number, 0)
        total = tl.zeros((WIDTH,), tl.float32)
        for first in range(begin, end, TOKENS):
            token = first + tl.arange(0, TOKENS)
            present = load_present(valid, head // H, token, N)
            total += tl.sum(load_rows(x, x_n, token, present, D, WIDTH).to(tl.float32) * factor, 0)
        mean = total / tl.maximum(count, 1.0)
        remainder, square = tl.zeros((WIDTH,), tl.float32), tl.zeros((WIDTH,), tl.float32)
        for first in range(begin, end, TOKENS):
            token = first + tl.arange(0, TOKENS)
            present = load_present(valid, head // H, token, N)
            y = load_rows(x, x_n, token, present, D, WIDTH).to(tl.float32) * factor
            y = tl.where(present[:, None], y - mean[None, :], 0.0)
            remainder += tl.sum(y, 0)
            square += tl.sum(y * y, 0)
        of_run, column = head * runs + run, tl.arange(0, WIDTH)
        left = remainder.to(tl.float64) / tl.maximum(count, 1.0)
        tl.store(factors + of_run, factor)
        tl.store(numbers + of_run, count)
        tl.store(squares + of_run, tl.sum(square.to(tl.float64) - count * left * left, 0))
        tl.store(means + of_run * D + column, mean.to(tl.float64) + left, mask=column < D)


@triton.jit
def moments_of_runs(
    x,
    x_b,
    x_h,
    x_n,
    x_valid,
    x_factors,
    x_numbers,
    x_squares,
    x_means,
    x_heads,
    x_runs,
    x_length,
    x_H,
    x_N,
    x_D,
    y,
    y_b,
    y_h,
    y_n,
    y_valid,
    y_factors,
    y_numbers,
    y_squares,
    y_means,
    y_heads,
    y_runs,
    y_length,
    y_H,
    y_N,
    y_D,
    x_WIDTH: tl.constexpr,
    x_TOKENS: tl.constexpr,
    y_WIDTH: tl.constexpr,
    y_TOKENS: tl.constexpr,
):
    """The moments of runs of x, and of those of y. One program takes one run of a head."""
    if tl.program_id(2) == 0:
        moments_of_run(
            *(x_factors, x_numbers, x_squares, x_means, x, x_b, x_h, x_n, x_valid, x_heads, x_runs, x_length),
            *(x_H, x_N, x_D, x_WIDTH, x_TOKENS),
        )
    elif y is not None:
        moments_of_run(
            *(y_factors, y_numbers, y_squares, y_means, y, y_b, y_h, y_n, y_valid, y_heads, y_runs, y_length),
            *(y_H, y_N, y_D, y_WIDTH, y_TOKENS),
        )


@triton.jit
def unit_of(least, factor):
    """least/factor for powers of two, by their exponents; 0 where a run's numbers are too small to count."""
    exponent = (least.to(tl.int32, bitcast=True) >> 23) - (factor.to(tl.int32, bitcast=True) >> 23)
    return (tl.maximum(exponent + 127, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def merge_runs(factor, mean, variance, count, factors, numbers, squares, means, heads, runs, D, WIDTH: tl.constexpr):
    """The moments of a head by those of its runs, if there is that head."""
    head, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    if head < heads:
        least = tl.load(factors + head * runs)
        n = tl.load(numbers + head * runs)
        for run in range(1, runs):
            least = tl.minimum(least, tl.load(factors + head * runs + run))
            n += tl.load(numbers + head * runs + run)
        n = tl.maximum(n, 1.0)
        inverse = 1.0 / (n.to(tl.float64) * D)  # one division for all: they take subroutines in fp64
        total = tl.zeros((WIDTH,), tl.float64)
        for run in range(runs):
            share = tl.load(numbers + head * runs + run) * unit_of(least, tl.load(factors + head * runs + run))
            run_mean = tl.load(means + (head * runs + run) * D + column, mask=column < D, other=0.0)
            total += share.to(tl.float64) * run_mean * (inverse * D)
        square = tl.zeros((WIDTH,), tl.float64)
        inside = inverse * 0.0
        for run in range(runs):
            unit = unit_of(least, tl.load(factors + head * runs + run)).to(tl.float64)
            run_mean = unit * tl.load(means + (head * runs + run) * D + column, mask=column < D, other=0.0)
            square += tl.load(numbers + head * runs + run).to(tl.float64) * (run_mean - total) * (run_mean - total)
            inside += unit * unit * tl.load(squares + head * runs + run)
        spread = (tl.sum(square, 0) + inside) * inverse
        tl.store(factor + head, least)
        tl.store(count + head, n)
        tl.store(variance + head, tl.where(spread < 0, 0.0, spread).to(tl.float32))
        tl.store(mean + head * D + column, total.to(tl.float32), mask=column < D)


@triton.jit
def merge_moments(
    x_merged_factor,
    x_merged_mean,
    x_merged_variance,
    x_merged_count,
    x_factors,
    x_numbers,
    x_squares,
    x_means,
    x_heads,
    x_runs,
    x_D,
    y_merged_factor,
    y_merged_mean,
    y_merged_variance,
    y_merged_count,
    y_factors,
    y_numbers,
    y_squares,
    y_means,
    y_heads,
    y_runs,
    y_D,
    x_WIDTH: tl.constexpr,
    y_WIDTH: tl.constexpr,
):
    """The moments of heads of x, and of those of y. One program takes one head."""
    if tl.program_id(1) == 0:
        merge_runs(
            *(x_merged_factor, x_merged_mean, x_merged_variance, x_merged_count),
            *(x_factors, x_numbers, x_squares, x_means, x_heads, x_runs, x_D, x_WIDTH),
        )
    elif y_means is not None:
        merge_runs(
            *(y_merged_factor, y_merged_mean, y_merged_variance, y_merged_count),
            *(y_factors, y_numbers, y_squares, y_means, y_heads, y_runs, y_D, y_WIDTH),
        )
