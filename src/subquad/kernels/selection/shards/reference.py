"""The ops over a rank's own tokens in plain PyTorch."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from subquad.kernels.precision import upcast
from subquad.kernels.selection.hashing.op import unpack_signs
from subquad.kernels.selection.kmeans.reference import keep_valid, nearest

WORD = 64  # bits


class Term(NamedTuple):
    """Vectors that are hashed as factor·(x − mean)."""

    x: Float[Tensor, "B H N D"]
    mean: Float[Tensor, "B H D"]
    factor: Float[Tensor, "B H"]


def moments_of(
    x: Float[Tensor, "B H N D"], valid: Bool[Tensor, "B N"] | None
) -> tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]:
    """The mean of each head's real vectors, and the sum of their squared distances to it, in fp64."""
    exact = x.detach().double()
    present = torch.ones_like(exact[:, :1, :, :1], dtype=torch.bool) if valid is None else valid[:, None, :, None]
    mean = exact.masked_fill(~present, 0.0).sum(2) / present.sum(2).clamp(min=1)
    squares = (exact - mean.unsqueeze(2)).masked_fill(~present, 0.0).square().sum((2, 3))
    return mean, squares


def centred_codes(
    terms: tuple[Term, ...], planes: Float[Tensor, "#B #H _ _"], valid: Bool[Tensor, "B N"] | None
) -> Int64[Tensor, "B H N"]:
    """Bit l of the word is 1 where [y_1, y_2, …]·w_l > 0, with y_t = factor·(x_t − mean) in fp32: like `hash_codes`.

    Words of padding are 0.
    """
    fine = torch.promote_types(terms[0].x.dtype, torch.float32)
    centred = [((x.double() - mean.unsqueeze(2)) * factor[..., None, None]).to(fine) for x, mean, factor in terms]
    positive = torch.cat(centred, dim=-1) @ planes.mT.to(fine) > 0
    codes = words_of(positive)
    return codes if valid is None else codes.where(valid[:, None], 0)


def words_of(bits: Bool[Tensor, "*any L"]) -> Int64[Tensor, "*any"]:
    """The word of these bits, the lowest first."""
    return (bits * torch.bitwise_left_shift(1, torch.arange(bits.shape[-1], device=bits.device))).sum(-1)


def assign_codes(
    codes: Int64[Tensor, "B H N"], centroids: Int64[Tensor, "B H C"], valid: Bool[Tensor, "B N"] | None
) -> tuple[Int64[Tensor, "B H N"], Int32[Tensor, "B H C 64"]]:
    """The nearest centroid of each code, and how many members of each centroid have each bit: half a round of k-means.

    The lowest of equally near centroids; C for padding. Bit 63 counts all members. All backends agree.
    """
    B, H, C = centroids.shape
    signs = unpack_signs(codes, WORD - 1)
    all_wanted = torch.full((B,), C, device=codes.device)
    labels = keep_valid(nearest(signs, unpack_signs(centroids, WORD - 1), all_wanted), valid, C)
    ones = torch.cat([(signs > 0).int(), torch.ones_like(signs[..., :1], dtype=torch.int32)], dim=-1)
    votes = ones.new_zeros(B, H, C + 1, WORD).scatter_add(2, labels.unsqueeze(-1).expand_as(ones), ones)
    return labels, votes[:, :, :C].contiguous()


def assign_means(
    x: Float[Tensor, "B H N D"],
    mean: Float[Tensor, "B H D"],
    directions: Float[Tensor, "B H D C"],
    halves: Float[Tensor, "B H C"],
    valid: Bool[Tensor, "B N"] | None,
) -> Int64[Tensor, "B H N"]:
    """For each vector the cluster with the smallest half − (x − mean)·direction, the lowest of equal ones.

    C for padding. Backends agree up to rounding.
    """
    centred = (upcast(x.detach())[0] - mean.unsqueeze(2)).to(directions.dtype)
    labels = (halves.unsqueeze(2) - centred @ directions).argmin(-1)
    return keep_valid(labels, valid, halves.shape[2])
