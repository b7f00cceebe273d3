"""The covariance of each head's vectors on GPUs: products of runs of tokens on tensor cores, added up in fp32."""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from subquad.kernels.triton.launch import dot, launch, load_rows, padded, rows, store_rows, strides
from subquad.kernels.triton.moments import RUN, RUNS, Moments, load_centred, load_present, stored
from subquad.kernels.triton.recording import LaunchCost

BLOCK = 64  # rows and columns that one program makes of a run
ROWS = 16  # rows that one program merges


def covariance(
    x: Float[Tensor, "B H N D"], valid: Bool[Tensor, "B N"] | None, statistics: Moments, jitter: float = 0.0
) -> Float64[Tensor, "B H D D"]:
    """The covariance of each head's real vectors, times factor², in fp64.

    `jitter`, if not 0, is the share of the mean variance that is added to each; where that is 0, it is 1.
    """
    x, (B, H, N, D), tokens, edge = rows(x), x.shape, 32, min(BLOCK, padded(x.shape[3]))
    length = triton.cdiv(max(RUN, triton.cdiv(N, RUNS)), tokens) * tokens
    runs, blocks = triton.cdiv(N, length), triton.cdiv(D, edge)
    products = x.new_empty(B, H, runs, D, D, dtype=torch.float32)
    launch(
        products_of_run,
        (runs, B * H, blocks * blocks),
        cost=LaunchCost(B * H * N * D * D, B * H * N * D * blocks * x.element_size() + 4 * products.numel()),
        **{"x": x, **strides("x", x), **statistics.arguments(), "valid": stored(valid), "products": products},
        **{"H": H, "N": N, "D": D, "length": length, "runs": runs, "TOKENS": tokens, "EDGE": edge},
    )
    spread = x.new_empty(B, H, D, D, dtype=torch.float64)
    launch(
        merge_products,
        (triton.cdiv(D, ROWS), B * H),
        cost=LaunchCost(bytes=4 * products.numel() + 8 * spread.numel()),
        **{"products": products, "count": statistics.count, "spread": spread, "jitter": jitter},
        **{"D": D, "runs": runs, "WIDTH": padded(D), "ROWS": ROWS},
    )
    return spread


@triton.jit
def products_of_run(
    x,
    x_b,
    x_h,
    x_n,
    factor,
    mean,
    valid,
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
        present = load_present(valid, head // H, token, N)
        left = load_centred(x, x_n, token, present, factor, mean, head, row, D, EDGE)
        total += dot(tl.trans(left), load_centred(x, x_n, token, present, factor, mean, head, column, D, EDGE))
    row, column = row + tl.arange(0, EDGE), column + tl.arange(0, EDGE)
    pointers = products + ((head * runs + run) * D + row)[:, None] * D + column[None, :]
    tl.store(pointers, total, mask=(row < D)[:, None] & (column < D)[None, :])


@triton.jit
def merge_products(products, count, spread, jitter, D, runs, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Σ over the runs / count in fp64, with the jitter on the diagonal, for a few rows of a head's matrix."""
    head, column = tl.program_id(1).to(tl.int64), tl.arange(0, WIDTH)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.load(count + head)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    diagonal = tl.zeros((WIDTH,), tl.float32)
    for run in range(runs):
        of_run = products + (head * runs + run) * D * D
        total += load_rows(of_run, D, row, row < D, D, WIDTH)
        diagonal += tl.load(of_run + column * (D + 1), mask=column < D, other=0.0)
    mean = tl.sum(diagonal.to(tl.float64), 0) / n / D
    added = tl.where(jitter > 0, tl.where(mean > 0, mean * jitter, 1.0), 0.0)
    result = total.to(tl.float64) / n + tl.where(row[:, None] == column[None, :], added, 0.0)
    store_rows(spread + head * D * D, D, row, row < D, result, D, WIDTH)
