"""The largest numbers of each row, found by counting: nothing is sorted or moved.

    threshold    the k-th largest of a row, by bisection: how many numbers are at least t, for some twenty t
    list         the places of the numbers above it, and of the first of those that equal it, in ascending order

    row          [2  7  1  7  9  3  7]     k = 3: the threshold is 7, one number is above it
    list              1        4           and 7 once more: 1, 3, 4

Numbers are compared as integers in the same order, so that the bisection ends: NaN is the largest, and −0 equals 0.
A program keeps the front of its row in registers, and reads the rest, where there is more, once for each t.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.kernels.triton.launch import launch
from subquad.kernels.triton.recording import LaunchCost

FRONT = 8192  # numbers of a row in registers
ROUNDS = 20  # of bisection until few numbers are left to tell apart; 32 at most
EACH = 3  # operations on a number in a round: compare, turn into 0 or 1, add


def list_largest(
    values: Tensor,
    listed: Tensor,
    *,
    empty: int,
    wanted: Tensor | None = None,
    finite: bool = True,
    of_blocks: Tensor | None = None,
    block: int = 1,
    ranks: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:
    """Fill `listed`, (B,H,C,K) ints, with the places of the K largest of each row in ascending order; then `empty`.

    Of equal numbers those in front are taken.

    Args:
        values: (B,H,C,n) fp32, contiguous, n ≥ K.
        listed: contiguous.
        empty: the value of slots without a number.
        wanted: (B,), how many of the largest an item takes; None: all K.
        finite: whether −∞ is never taken.
        of_blocks: (B,H,C,n/block), the numbers of the blocks that a row is made of: place p is then that of
            of_blocks[p // block] · block + p % block; None: the row is whole.
        block: the length of the blocks.
        ranks: (B,H,C,n) int32, to be filled with the slot that each number is listed in, −1 for others; or None.
        lse: (B,H,C) fp32, to be filled with ln Σ e^value of those that are listed, or None.
    """
    (B, H, C, n), K = values.shape, listed.shape[3]
    front = min(FRONT, triton.next_power_of_2(max(1, n)))
    moved = values.numel() * (1 if ranks is None else 2) * 4 + listed.numel() * listed.element_size()
    inputs: dict[str, Any] = {"values": values, "listed": listed, "wanted": wanted, "of_blocks": of_blocks}
    inputs |= {"ranks": ranks, "lse": lse, "H": H, "C": C, "n": n, "K": K, "empty": empty}
    launch(
        list_row,
        (C, B * H),
        num_warps=min(8, max(1, front // 256)),
        cost=LaunchCost(bytes=moved, operations=values.numel() * ROUNDS * EACH),
        **inputs,
        **{"finite": finite, "BLOCK": block, "FRONT": front},
    )


@triton.jit
def ordered(x):
    """Integers in the order of these numbers."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # −0 + 0 is 0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, bits)


@triton.jit
def number(of_order):
    """The number whose `ordered` this is."""
    return tl.where(of_order < 0, of_order ^ 0x7FFFFFFF, of_order).to(tl.float32, bitcast=True)


@triton.jit
def load_ordered(values, at, n):
    """A row's numbers in these places as integers, lower than any number behind its end."""
    x = tl.load(values + at, mask=at < n, other=0.0)
    return tl.where(at < n, ordered(x), -(2**31))


@triton.jit
def at_least(held, values, n, least, FRONT: tl.constexpr):
    """The number of entries of a row that are at least `least`; `held` is its front."""
    count = tl.sum((held >= least).to(tl.int32), 0)
    for start in range(FRONT, n, FRONT):
        count += tl.sum((load_ordered(values, start + tl.arange(0, FRONT), n) >= least).to(tl.int32), 0)
    return count


@triton.jit
def bounds(held, values, n, FRONT: tl.constexpr):
    """The smallest and the largest number of a row."""
    at = tl.arange(0, FRONT)
    low, high = tl.min(tl.where(at < n, held, 2**31 - 1), 0), tl.max(held, 0)
    for start in range(FRONT, n, FRONT):
        more = load_ordered(values, start + at, n)
        low = tl.minimum(low, tl.min(tl.where(start + at < n, more, 2**31 - 1), 0))
        high = tl.maximum(high, tl.max(more, 0))
    return low, high


@triton.jit
def kth_largest(held, values, n, k, low, high, FRONT: tl.constexpr):
    """A t that k numbers are at least as large as, and fewer are larger than; it lies between `low` and `high`."""
    least, beyond, passed = low.to(tl.int64), high.to(tl.int64) + 1, n
    while (beyond - least > 1) & (passed != k):
        middle = (least + beyond) >> 1
        count = at_least(held, values, n, middle.to(tl.int32), FRONT)
        enough = count >= k
        least, beyond = tl.where(enough, middle, least), tl.where(enough, beyond, middle)
        passed = tl.where(enough, count, passed)
    return least.to(tl.int32)


@triton.jit
def list_row(
    values,
    listed,
    wanted,
    of_blocks,
    ranks,
    lse,
    H,
    C,
    n,
    K,
    empty,
    finite: tl.constexpr,
    BLOCK: tl.constexpr,
    FRONT: tl.constexpr,
):
    """The list of one row."""
    head = tl.program_id(1).to(tl.int64)
    row = head * C + tl.program_id(0)
    values += row * n
    listed += row * K
    k = K if wanted is None else tl.load(wanted + head // H).to(tl.int32)
    k = tl.minimum(tl.maximum(k, 0), K)
    held = load_ordered(values, tl.arange(0, FRONT), n)
    low, high = bounds(held, values, n, FRONT)
    threshold = kth_largest(held, values, n, k, low, high, FRONT)
    of_equal = k - tl.sum((held > threshold).to(tl.int32), 0)  # how many numbers that equal the threshold are taken
    for start in range(FRONT, n, FRONT):
        of_equal -= tl.sum((load_ordered(values, start + tl.arange(0, FRONT), n) > threshold).to(tl.int32), 0)
    largest = number(high)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    taken, equals, total = 0, 0, 0.0
    for start in range(0, n, FRONT):
        at = start + tl.arange(0, FRONT)
        x = load_ordered(values, at, n)
        equal = (x == threshold).to(tl.int32)
        chosen = (x > threshold) | ((equal != 0) & (equals + tl.cumsum(equal, 0) <= of_equal))
        if finite:
            chosen = chosen & (number(x) != float("-inf"))
        slot = taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        written = at
        if of_blocks is not None:
            written = (
                tl.load(of_blocks + row * tl.cdiv(n, BLOCK) + at // BLOCK, mask=chosen, other=0) * BLOCK + at % BLOCK
            )
        tl.store(listed + slot, written, mask=chosen)
        if ranks is not None:
            tl.store(ranks + row * n + at, tl.where(chosen, slot, -1), mask=at < n)
        if lse is not None:
            total += tl.sum(tl.where(chosen, tl.exp(number(x) - safe), 0.0), 0)
        taken += tl.sum(chosen.to(tl.int32), 0)
        equals += tl.sum(equal, 0)
    for start in range(0, K, FRONT):
        slot = start + tl.arange(0, FRONT)
        tl.store(listed + slot, tl.zeros_like(slot) + empty, mask=(slot >= taken) & (slot < K))
    if lse is not None:
        tl.store(lse + row, tl.log(total) + safe)
