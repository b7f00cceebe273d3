"""Cells of keys, in plain PyTorch."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.ops.choose.hashing.op import hash_codes
from subquad.ops.choose.hashing.reference import centred
from subquad.ops.choose.kmeans.op import hamming_kmeans


def key_cells(
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    real: Bool[Tensor, "B M"] | None,
    *,
    cells: int,
    bits: int,
    iterations: int,
    seed: int,
) -> Int64[Tensor, "B G M"]:
    """As `subquad.ops.choose.cells.op.key_cells`."""
    both = torch.cat([standardised(key, real), standardised(value, real)], dim=-1)
    return hamming_kmeans(hash_codes(both, bits, seed), real, cells, bits, iterations)


def standardised(x: Float[Tensor, "B G M D"], real: Bool[Tensor, "B M"] | None) -> Float[Tensor, "B G M D"]:
    """Vectors less their head's mean, divided by one standard deviation for all their components. Padding is 0."""
    x = centred(x.detach(), real)
    x = x if real is None else x.masked_fill(~real[:, None, :, None], 0.0)
    largest = x.abs().amax((2, 3), keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)  # squares cannot overflow
    count = x.new_tensor(x.shape[2]) if real is None else real.sum(1).clamp(min=1)[:, None, None, None]
    # In fp64, so that the order of the sum, which changes with padding, cannot turn a bit of the hash.
    variance = x.double().square().sum((2, 3), keepdim=True) / (count * x.shape[3])
    return x / torch.where(variance > 0, variance.sqrt(), 1.0).to(x.dtype)
