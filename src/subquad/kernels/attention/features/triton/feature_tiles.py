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
e^{y_jr − c_r} ≤ 1, and e^{x_ir + c_r − m_i} ≤ 1 with the query's own maximum m_i, whatever follows. The maxima
of squares grow with these: if `largest` holds each feature's maximum over a token's s tokens, the exchange of the
halves of each 2s tokens gives a query the c of the keys it sees, and the larger of both is that of 2s tokens.
"""

import triton
import triton.language as tl

from subquad.kernels.triton.launch import dot, load_rows

# A function of Triton before 3.7 returns no None within a tuple: what may be None is returned alone.


@triton.jit
def advanced(pointer, steps):
    """The pointer, `steps` numbers on; None stays None."""
    if pointer is not None:
        return pointer + steps


@triton.jit
def shift_of(shift, b, head, shift_b, shift_h, shift_n, token, present):
    """The shift of these tokens, −∞ for those that are not there; None if there is none."""
    if shift is not None:
        at = shift + b * shift_b + head * shift_h + token.to(tl.int64) * shift_n
        return tl.load(at, mask=present, other=-float("inf"))


@triton.jit
def not_taken_out(shift, present):
    """The tokens that are present and not taken out, which a shift of −∞ does."""
    if shift is None:
        return present
    else:
        return present & (shift != -float("inf"))


@triton.jit
def exponents(
    rows,
    step,
    projection,
    bias,
    shift,
    token,
    present,
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
    if projection is None:
        made = load_rows(rows + first, step, token, present, R - first, FEATURES).to(tl.float32)
    else:
        made = tl.zeros((TOKENS, FEATURES), tl.float32)
        for start in range(0, D, SLICE):
            part = load_rows(rows + start, step, token, present, D - start, SLICE)
            made += _projected(part, tl.trans(load_rows(projection + start, D, feature, exists, D - start, SLICE)))
    if bias is not None:
        made += tl.load(bias + feature, mask=exists, other=0.0)[None, :]
    if shift is not None:
        made += shift[:, None]
    return tl.where(present[:, None] & exists[None, :], made, -float("inf"))


@triton.jit
def _projected(rows, projection):
    """rows·of; rows of 16 bits meet the projection as a sum of two numbers of their kind, which loses nothing."""
    if rows.dtype == tl.float32:
        return dot(rows, projection)
    else:
        high = projection.to(rows.dtype)
        return dot(rows, high) + dot(rows, (projection - high.to(tl.float32)).to(rows.dtype))


@triton.jit
def base_of(largest):
    """A maximum as a number to subtract: −∞ is that of nothing, and −∞ − (−∞) would be NaN."""
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit
def is_finite(x):
    """A bool that is True where a number is finite."""
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
def is_later(size, TOKENS: tl.constexpr):
    """(TOKENS): whether the token is one of the later `size` of its 2·size."""
    return tl.arange(0, TOKENS) & size != 0


@triton.jit
def causal_square(size, TOKENS: tl.constexpr):
    """(TOKENS, TOKENS): whether the pair of a query and a key lies in a square of this size."""
    token = tl.arange(0, TOKENS)
    return ((token[:, None] ^ token[None, :]) // size == 1) & is_later(size, TOKENS)[:, None]


@triton.jit
def diagonal_square(TOKENS: tl.constexpr):
    """(TOKENS, TOKENS): whether query and key are the same token."""
    token = tl.arange(0, TOKENS)
    return token[:, None] == token[None, :]


@triton.jit
def exchanged(tile, size, TOKENS: tl.constexpr, FEATURES: tl.constexpr):
    """The tile with the halves of each 2·size tokens exchanged."""
    token = tl.arange(0, TOKENS) ^ size
    return tl.gather(tile, tl.broadcast_to(token[:, None], (TOKENS, FEATURES)), 0)


@triton.jit
def of_later(x, largest, size, TOKENS: tl.constexpr):
    """e^{x_ir + c_r} of the queries in squares of this size, and 0 for others."""
    return tl.exp(tl.where(is_later(size, TOKENS)[:, None], x + largest, -float("inf")))


@triton.jit
def of_earlier(y, largest, size, TOKENS: tl.constexpr):
    """e^{y_jr − c_r} of the keys in squares of this size, and 0 for others."""
    return tl.exp(tl.where(is_later(size, TOKENS)[:, None], -float("inf"), y - base_of(largest)))
