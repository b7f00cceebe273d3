"""Cells of keys, in plain PyTorch."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.selection.kmeans.op import hamming_kmeans

BITS = 63  # of the hashes that cells are made from
ITERATIONS = 3  # of their k-means; more change the error by less than one percent


def key_cells(
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    valid: Bool[Tensor, "B M"] | None,
    *,
    cells: int,
    seed: int,
    bits: int = BITS,
    iterations: int = ITERATIONS,
) -> Int64[Tensor, "B G M"]:
    """Cells of tokens whose keys and values are alike: k-means of the sign hashes of [k/σ_k, v/σ_v], head by head.

    Keys and values are taken less their mean; σ_k and σ_v are one standard deviation each, over all components of a
    head's real keys and values. Values count because a cell has one of them, too: with keys alone the error of
    attention is a few percent larger.

    Returns labels in [0, cells), and `cells` for padding. An item with no more real keys than cells: each is its own
    cell. Nothing is differentiated. Backends agree up to rounding.
    """
    both = torch.cat([standardised(key, valid), standardised(value, valid)], dim=-1)
    return hamming_kmeans(hash_codes(both, bits, seed), valid, cells, bits, iterations)


def standardised(x: Float[Tensor, "B G M D"], valid: Bool[Tensor, "B M"] | None) -> Float[Tensor, "B G M D"]:
    """Vectors less their head's mean, divided by one standard deviation for all their components. Padding is 0."""
    # In fp64, so that the order of the sums, which changes with padding, cannot turn a bit of the hash.
    upcast = x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)  # Apple's GPUs have no fp64
    present = None if valid is None else valid[:, None, :, None]
    count = x.shape[2] if present is None else present.sum(2, keepdim=True).clamp(min=1)

    def total(y: Tensor) -> Tensor:
        return (y if present is None else y.masked_fill(~present, 0.0)).sum(2, keepdim=True)

    centred = upcast - total(upcast) / count
    variance = total(centred.square()).sum(3, keepdim=True) / (count * x.shape[3])
    result = centred / torch.where(variance > 0, variance.sqrt(), 1.0)
    result = result if present is None else result.masked_fill(~present, 0.0)
    return result.to(torch.promote_types(x.dtype, torch.float32))
