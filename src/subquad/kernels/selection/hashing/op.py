"""The op `hash_codes`."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.kernels.dispatch import Op
from subquad.kernels.selection.hashing import reference

MAX_BITS = 63  # of a signed 64-bit word


hash_codes = Op(reference.hash_codes)


@hash_codes.compiled
def run(backend: str, x: Any) -> Tensor:
    """Run on a compiled backend: nothing is differentiated."""
    words: Tensor = hash_words.run(backend, x.x.detach(), x.bits, x.seed, x.centre, x.valid)
    return words


@hash_codes.operator("x", "bits", "seed", "centre", "valid")
def hash_words(x: Any) -> Tensor:
    """Allocate the words."""
    words: Tensor = x.x.new_empty(x.x.shape[:3], dtype=torch.int64)
    return words


def unpack_signs(codes: Int64[Tensor, "..."], bits: int) -> Float[Tensor, "... {bits}"]:
    """The bits of each word as −1 and +1 in fp32, lowest bit first."""
    shifts = torch.arange(bits, device=codes.device)
    return (torch.bitwise_right_shift(codes[..., None], shifts) & 1).float() * 2 - 1
