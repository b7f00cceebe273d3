"""Sign hashes on GPUs: a tile of vectors meets all directions in one product, and its signs are packed at once."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from subquad.ops.choose.hashing.op import hash_codes, hash_words
from subquad.ops.choose.hashing.reference import centred
from subquad.ops.triton import refusal_of
from subquad.ops.triton.launch import dot, launch, load_rows, padded, rows, strides, tile
from subquad.ops.triton.recording import Work
from subquad.randomness import orthogonal

MOST_ROWS = 64  # vectors of a tile


@hash_codes.refusal("triton")
def refusal(x: Tensor, *_: object, **__: object) -> str | None:
    """Why the kernel cannot take these vectors; None where it can."""
    return refusal_of(x)


@hash_words.on("triton")
def compute(codes: Tensor, given: Any) -> None:
    """The Triton backend of `hash_codes`."""
    x, bits = given.x, given.bits
    x = rows(centred(x, given.real) if given.centre else x)
    (B, H, N, D), tokens = x.shape, tile(x.shape[2], MOST_ROWS)
    launch(
        sign_words,
        (triton.cdiv(N, tokens), B * H),
        work=Work(B * H * N * D * bits, B * H * N * (D * x.element_size() + 8)),
        x=x,
        **strides("x", x),
        planes=orthogonal(given.seed, bits, D, like=x.new_empty(0).float()),
        real=given.real,
        codes=codes,
        H=H,
        N=N,
        bits=bits,
        D=D,
        SLICE=min(32, padded(D)),
        BITS=padded(bits),
        TOKENS=tokens,
    )


@triton.jit
def sign_words(
    x,
    x_b,
    x_h,
    x_n,
    planes,
    real,
    codes,
    H,
    N,
    bits: tl.constexpr,
    D: tl.constexpr,
    SLICE: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """codes[token] = Σ_l [x·w_l > 0] 2^l, 0 for padding. One program takes one tile of a head's tokens."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    bit = tl.arange(0, BITS)
    there = token < N
    x += head // H * x_b + head % H * x_h
    projected = tl.zeros((TOKENS, BITS), tl.float32)
    for start in range(0, D, SLICE):  # the three TF32 parts of whole vectors would not fit into registers
        vectors = load_rows(x + start, x_n, token, there, D - start, SLICE).to(tl.float32)
        directions = load_rows(planes + start, D, bit, bit < bits, D - start, SLICE)
        projected += dot(vectors, tl.trans(directions))
    words = tl.sum(tl.where(projected > 0, (tl.full((BITS,), 1, tl.int64) << bit.to(tl.int64))[None, :], 0), 1)
    if real is not None:
        words = tl.where(tl.load(real + head // H * N + token, mask=there, other=0) != 0, words, 0)
    tl.store(codes + head * N + token, words, mask=there)
