"""Tiles of exponents and of pairs, which the kernels of attention by features share.

A chunk is as many tokens as a program holds. Inside of one, causal attention is cut into squares, as in the reference:
for s = 1, 2, 4, … the later s tokens of each 2s see all of the earlier s. All squares of one s are one product of the
chunk's queries and keys, of which the squares are taken. For a chunk of 8:

    s = 4  · · · ·          s = 2  · ·              s = 1  ·               itself  ■
           · · · ·                 · ·                     ■ ·                       ■
           · · · ·                 ■ ■ · ·                     ·                       ■
           · · · ·                 ■ ■ · ·                     ■ ·                       ■
           ■ ■ ■ ■ · · · ·                 · ·                     ·                       ■
           ■ ■ ■ ■ · · · ·                 · ·                     ■ ·                       ■
           ■ ■ ■ ■ · · · ·                 ■ ■ · ·                     ·                       ■
           ■ ■ ■ ■ · · · ·                 ■ ■ · ·                     ■ ·                       ■

The keys of a square are weighed with their own maxima, c_r = max_j y_jr, which all of its queries see. So
e^{y_jr − c_r} ≤ 1, and e^{x_ir + c_r − m_i} ≤ 1 with the query's own maximum m_i, whatever follows.
"""

import triton
import triton.language as tl

from subquad.ops.triton.launch import dot, load_rows


@triton.jit
def exponents(
    rows,
    step,
    of,
    bias,
    shift,
    token,
    there,
    first,
    D: tl.constexpr,
    R: tl.constexpr,
    SLICE: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """(TOKENS, FEATURES) exponents, of·row + bias + shift, of the features from `first` on.

    −∞ for tokens that are not there, and behind the last feature.
    """
    feature = first + tl.arange(0, FEATURES)
    exists = feature < R
    if of is None:
        made = load_rows(rows + first, step, token, there, R - first, FEATURES).to(tl.float32)
    else:
        made = tl.zeros((TOKENS, FEATURES), tl.float32)
        for start in range(0, D, SLICE):
            part = load_rows(rows + start, step, token, there, D - start, SLICE)
            made += _projected(part, tl.trans(load_rows(of + start, D, feature, exists, D - start, SLICE)))
    if bias is not None:
        made += tl.load(bias + feature, mask=exists, other=0.0)[None, :]
    if shift is not None:
        made += shift[:, None]
    return tl.where(there[:, None] & exists[None, :], made, -float("inf"))


@triton.jit
def _projected(rows, of):
    """rows·of; rows of 16 bits meet the projection as a sum of two numbers of their kind, which loses nothing."""
    if rows.dtype == tl.float32:
        return dot(rows, of)
    else:
        high = of.to(rows.dtype)
        return dot(rows, high) + dot(rows, (of - high.to(tl.float32)).to(rows.dtype))


@triton.jit
def base_of(largest):
    """A maximum as a number to subtract: −∞ is that of nothing, and −∞ − (−∞) would be NaN."""
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit
def is_finite(x):
    """Whether these are numbers, and not infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def numbers(x):
    """x with 0 for what is not finite."""
    return tl.where(is_finite(x), x, 0.0)


@triton.jit
def dot_as(a, b, KIND: tl.constexpr):
    """a·b of fp32 numbers that are rounded to this kind first."""
    return dot(a.to(KIND), b.to(KIND))


@triton.jit
def seen_squares(SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """(TOKENS, TOKENS): whether the pair of a query and a key lies in a square of this size."""
    block = tl.arange(0, TOKENS) // SIZE
    return (block % 2 == 1)[:, None] & (block[:, None] == block[None, :] + 1)


@triton.jit
def seen_itself(TOKENS: tl.constexpr):
    """(TOKENS, TOKENS): whether query and key are the same token."""
    token = tl.arange(0, TOKENS)
    return token[:, None] == token[None, :]


@triton.jit
def earlier_half(tile, SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """The tile's rows with −∞ for the later SIZE of each 2·SIZE tokens."""
    later = tl.arange(0, TOKENS) // SIZE % 2 == 1
    return tl.where(later[:, None], -float("inf"), tile)


@triton.jit
def later_half(tile, SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """The tile's rows with −∞ for the earlier SIZE of each 2·SIZE tokens."""
    later = tl.arange(0, TOKENS) // SIZE % 2 == 1
    return tl.where(later[:, None], tile, -float("inf"))


@triton.jit
def largest_of_squares(earlier, SIZE: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr):
    """c: each feature's maximum in each 2·SIZE tokens, for all of these tokens; of an `earlier_half`."""
    BLOCKS: tl.constexpr = TOKENS // (2 * SIZE)
    largest = tl.max(tl.reshape(earlier, (BLOCKS, 2 * SIZE, FEATURES)), 1)
    spread = tl.broadcast_to(tl.expand_dims(largest, 1), (BLOCKS, 2 * SIZE, FEATURES))
    return tl.reshape(spread, (TOKENS, FEATURES))
