"""Sign hashes on GPUs: a tile of vectors meets all directions in one product, and its signs are packed at once."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from subquad.core.randomness import orthogonal
from subquad.kernels.selection.hashing.op import hash_codes, hash_words
from subquad.kernels.triton import refusal_of
from subquad.kernels.triton.launch import dot, launch, load_rows, padded, rows, strides, tile
from subquad.kernels.triton.moments import Moments, load_centred, load_present, moments
from subquad.kernels.triton.recording import LaunchCost

MOST_ROWS = 64  # vectors of a tile
SLICE = 32  # components at a time: the three TF32 parts of whole vectors would not fit into registers


@hash_codes.refusal("triton")
def refusal(x: Any) -> str | None:
    """The reason why the kernel cannot take these vectors; None if it can."""
    return refusal_of(x.x)


@hash_words.on("triton")
def compute(codes: Tensor, inputs: Any) -> None:
    """The Triton backend of `hash_codes`."""
    x = inputs.x
    planes = planes_of(inputs.seed, inputs.bits, x.shape[3], x.device)
    sign_hash(codes, inputs.valid, Projected(x, planes, moments(x, inputs.valid) if inputs.centre else None))


@lru_cache(maxsize=256)  # of layers, seeds and devices in use: to move them each time would wait for the device
def planes_of(seed: int, bits: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random directions, (bits,width), which stay on the device."""
    with torch.inference_mode(False):
        return orthogonal(seed, bits, width, like=torch.empty(0, dtype=dtype, device=device))


@dataclass(frozen=True)
class Projected:
    """Vectors (B,H,N,D) with directions (bits,D) or (B,G,bits,D).

    They are centred by their moments if there are some. If both of two kinds are `scaled`, each is divided by its
    standard deviation.
    """

    x: Tensor
    planes: Tensor
    centring: Moments | None
    scaled: bool = False

    def arguments(self, name: str) -> dict[str, Any]:
        """The kernel's arguments, by name."""
        x, planes = rows(self.x), rows(self.planes)
        of_head, next_row, share = 0, planes.stride(-2), 1
        if planes.ndim == 4:  # from a head's directions to the next, those of other items too
            # Not by strides, which are arbitrary for an axis of length 1.
            planes, of_head, next_row = planes.contiguous(), planes.shape[2:].numel(), planes.shape[3]
            share = x.shape[1] // planes.shape[1]  # heads that have the same ones
        inputs = {"planes": planes, "planes_h": of_head, "planes_n": next_row, "share": share}
        inputs |= {"D": x.shape[3], "SLICE": min(SLICE, padded(x.shape[3]))}
        inputs |= {"factor": None, "mean": None} if self.centring is None else self.centring.arguments()
        inputs["variance"] = self.centring.variance if self.scaled and self.centring is not None else None
        return {name: x, **strides(name, x), **{f"{name}_{what}": value for what, value in inputs.items()}}


def sign_hash(codes: Tensor, valid: Tensor | None, x: Projected, y: Projected | None = None) -> None:
    """Fill codes (B,H,N) with the signs of x·planes, or of x·planes + y·planes: those of [x, y], without a copy."""
    (B, H, N, D), bits = x.x.shape, x.planes.shape[-2]
    tokens = tile(N, MOST_ROWS if y is None else MOST_ROWS // 2)
    width = D + (0 if y is None else y.x.shape[3])
    products = B * H * N * width * bits * (2 if x.x.element_size() == 2 else 1)
    launch(
        sign_words,
        (triton.cdiv(N, tokens), B * H),
        cost=LaunchCost(products, B * H * N * (width * x.x.element_size() + 8)),
        **x.arguments("x"),
        **(NOTHING if y is None else y.arguments("y")),
        valid=None if valid is None else valid.contiguous(),
        codes=codes,
        H=H,
        N=N,
        bits=bits,
        BITS=padded(bits),
        TOKENS=tokens,
    )


OF_Y = ("", "_b", "_h", "_n", "_planes", "_planes_h", "_planes_n", "_share", "_factor", "_mean", "_variance")
NOTHING: dict[str, Any] = dict.fromkeys(f"y{what}" for what in (*OF_Y, "_D", "_SLICE"))


@triton.jit
def project(
    total,
    x,
    x_b,
    x_h,
    x_n,
    planes,
    planes_h,
    planes_n,
    share,
    factor,
    mean,
    head,
    H,
    token,
    present,
    bits,
    D,
    SLICE: tl.constexpr,
):
    """`total`, (tokens, bits), with the vectors' products with the directions added.

    Vectors of 16 bits meet the tensor cores as they are. A direction w is then the sum of two of 16 bits, which hold
    all but its last bits, and what centring changes is the same for all tokens: y·w = f·x·w − μ·w.
    """
    x += head // H * x_b + head % H * x_h
    planes += head // share * planes_h
    bit = tl.arange(0, total.shape[1])
    if x.dtype.element_ty == tl.float32:
        for start in range(0, D, SLICE):
            vectors = load_centred(x, x_n, token, present, factor, mean, head, start, D, SLICE)
            directions = load_rows(planes + start, planes_n, bit, bit < bits, D - start, SLICE).to(tl.float32)
            total += dot(vectors, tl.trans(directions))
    else:
        raw, shift = tl.zeros_like(total), tl.zeros((total.shape[1],), tl.float32)
        for start in range(0, D, SLICE):
            vectors = load_rows(x + start, x_n, token, present, D - start, SLICE)
            directions = load_rows(planes + start, planes_n, bit, bit < bits, D - start, SLICE).to(tl.float32)
            if mean is not None:
                column = start + tl.arange(0, SLICE)
                of_mean = tl.load(mean + head * D + column, mask=column < D, other=0.0)
                shift += tl.sum(directions * of_mean[None, :], 1)
            high = directions.to(vectors.dtype)
            raw += dot(vectors, tl.trans(high))
            raw += dot(vectors, tl.trans((directions - high.to(tl.float32)).to(vectors.dtype)))
        total += raw * (1.0 if factor is None else tl.load(factor + head)) - shift[None, :]
    return total


@triton.jit
def deviation(variance, head):
    """One standard deviation of a head's vectors; 1 where they are all equal."""
    spread = tl.load(variance + head)
    return tl.where(spread > 0, tl.sqrt(spread), 1.0)


@triton.jit
def sign_words(
    x,
    x_b,
    x_h,
    x_n,
    x_planes,
    x_planes_h,
    x_planes_n,
    x_share,
    x_factor,
    x_mean,
    x_variance,
    y,
    y_b,
    y_h,
    y_n,
    y_planes,
    y_planes_h,
    y_planes_n,
    y_share,
    y_factor,
    y_mean,
    y_variance,
    valid,
    codes,
    H,
    N,
    bits: tl.constexpr,
    x_D: tl.constexpr,
    x_SLICE: tl.constexpr,
    y_D: tl.constexpr,
    y_SLICE: tl.constexpr,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """codes[token] = Σ_l [x·w_l > 0] 2^l, 0 for padding. One program takes one tile of a head's tokens."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    bit = tl.arange(0, BITS)
    present = load_present(valid, head // H, token, N)
    total = tl.zeros((TOKENS, BITS), tl.float32)
    total = project(
        *(total, x, x_b, x_h, x_n, x_planes, x_planes_h, x_planes_n, x_share, x_factor, x_mean, head),
        *(H, token, present, bits, x_D, x_SLICE),
    )
    if y is not None:
        if x_variance is not None:  # x/σ_x + y/σ_y, times σ_y, which changes no sign
            total *= deviation(y_variance, head) / deviation(x_variance, head)
        total = project(
            *(total, y, y_b, y_h, y_n, y_planes, y_planes_h, y_planes_n, y_share, y_factor, y_mean, head),
            *(H, token, present, bits, y_D, y_SLICE),
        )
    words = tl.sum(tl.where(total > 0, (tl.full((BITS,), 1, tl.int64) << bit.to(tl.int64))[None, :], 0), 1)
    tl.store(codes + head * N + token, tl.where(present, words, 0), mask=token < N)
