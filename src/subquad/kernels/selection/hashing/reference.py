"""Sign hashes in plain PyTorch."""

from functools import reduce

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.core.randomness import orthogonal

HALF = 32  # bits of a word


def hash_codes(
    x: Float[Tensor, "B H N D"],
    bits: int,
    seed: int,
    *,
    centre: bool = False,
    valid: Bool[Tensor, "B N"] | None = None,
) -> Int64[Tensor, "B H N"]:
    """Bit l of the word is 1 where x·w_l > 0, for random directions w_l drawn from the seed: one set for all heads.

    Two vectors at angle θ differ in a bit with probability θ/π (Charikar 2002). The directions are orthogonal in runs
    of D, which leaves that probability and lowers the variance over bits (super-bit LSH, Ji et al. 2012). Projections
    are taken in fp32, fp64 for fp64 inputs. 1 ≤ bits ≤ 63. With `centre`, the vectors are taken less the mean of their
    head's real ones. Words of padding (`valid` False) are 0.
    """
    x = x.detach()
    x = centred(x, valid) if centre else x
    x = x if x.dtype == torch.float64 else x.float()
    planes = orthogonal(seed, bits, x.shape[-1], like=x)
    positive = x @ planes.T > 0
    weights = torch.bitwise_left_shift(1, torch.arange(bits, device=x.device))
    # In halves, each exact in fp64: ONNX Runtime adds up int64 in it, and would lose the last bits of a word.
    codes = reduce(torch.add, [half.sum(-1) for half in (positive * weights).split(HALF, dim=-1)])
    return codes if valid is None else codes.where(valid[:, None], 0)


def centred(x: Float[Tensor, "B H N D"], valid: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B H N D"]:
    """Vectors less the mean of the item's real ones, head by head."""
    # In fp64, so that the order of the sum, which changes with the amount of padding, cannot turn a bit of the hash.
    upcast = x.to(torch.float32 if x.device.type == "mps" else torch.float64)  # Apple's GPUs have no fp64
    if valid is None:
        mean = upcast.mean(2, keepdim=True)
    else:
        present = valid[:, None, :, None]
        mean = upcast.masked_fill(~present, 0.0).sum(2, keepdim=True) / present.sum(2, keepdim=True).clamp(min=1)
    return (upcast - mean).to(torch.promote_types(x.dtype, torch.float32))
