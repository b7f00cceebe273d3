"""The op `hash_codes`."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.ops.backends import Op, Operator
from subquad.ops.choose.hashing import reference

MAX_BITS = 63  # of a signed 64-bit word


@Op
def hash_codes(
    x: Float[Tensor, "B H N D"],
    bits: int,
    seed: int,
    *,
    centre: bool = False,
    real: Bool[Tensor, "B N"] | None = None,
) -> Int64[Tensor, "B H N"]:
    """Bit l of the word is 1 where x·w_l > 0, for random directions w_l drawn from the seed: one set for all heads.

    Two vectors at angle θ differ in a bit with probability θ/π (Charikar 2002). The directions are orthogonal in runs
    of D, which leaves that probability and lowers the variance over bits (super-bit LSH, Ji et al. 2012). Projections
    are taken in fp32, fp64 for fp64 inputs. 1 ≤ bits ≤ 63. With `centre`, the vectors are taken less the mean of their
    head's real ones. Words of padding (`real` False) are 0.
    """
    return reference.hash_codes(x.detach(), bits, seed, centre=centre, real=real)


@Operator
def hash_words(x: Tensor, bits: int, seed: int, centre: bool, real: Tensor | None) -> Tensor:
    """Allocate the words."""
    return x.new_empty(x.shape[:3], dtype=torch.int64)


@hash_codes.compiled
def _(backend: str, x: Tensor, bits: int, seed: int, *, centre: bool = False, real: Tensor | None = None) -> Tensor:
    return hash_words(backend, x.detach(), bits, seed, centre, real)


def unpack_signs(codes: Int64[Tensor, "..."], bits: int) -> Float[Tensor, "... {bits}"]:
    """The bits of each word as −1 and +1 in fp32, lowest bit first."""
    shifts = torch.arange(bits, device=codes.device)
    return (torch.bitwise_right_shift(codes[..., None], shifts) & 1).float() * 2 - 1
