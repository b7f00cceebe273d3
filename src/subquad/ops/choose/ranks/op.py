"""Ops over a rank's own tokens, for clusters that hold tokens of several ranks. Nothing is differentiated."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from subquad.ops.backends import Op, Operator
from subquad.ops.choose.ranks import reference
from subquad.ops.choose.ranks.reference import Term

WORD = 64  # bits


@Op
def moments_of(
    x: Float[Tensor, "B H N D"], real: Bool[Tensor, "B N"] | None
) -> tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]:
    """The mean of each head's real vectors, and the sum of their squared distances to it, in fp64."""
    return reference.moments_of(x.detach(), real)


@moments_of.compiled
def _(backend: str, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    return means_and_squares(backend, x.detach(), real)


@Operator
def means_and_squares(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Allocate both."""
    B, H, _, D = x.shape
    return x.new_empty(B, H, D, dtype=torch.float64), x.new_empty(B, H, dtype=torch.float64)


@Op
def centred_codes(
    terms: tuple[Term, ...], planes: Float[Tensor, "#B #H _ _"], real: Bool[Tensor, "B N"] | None
) -> Int64[Tensor, "B H N"]:
    """Bit l of the word is 1 where [y_1, y_2, …]·w_l > 0, with y_t = factor·(x_t − mean) in fp32: like `hash_codes`.

    Words of padding are 0.
    """
    return reference.centred_codes(terms, planes, real)


@centred_codes.compiled
def _(backend: str, terms: tuple[Term, ...], planes: Tensor, real: Tensor | None) -> Tensor:
    xs, means, factors = ([getattr(term, name) for term in terms] for name in ("x", "mean", "factor"))
    return words_of_terms(backend, [x.detach() for x in xs], means, factors, planes, real)


@Operator
def words_of_terms(
    xs: list[Tensor], means: list[Tensor], factors: list[Tensor], planes: Tensor, real: Tensor | None
) -> Tensor:
    """Allocate the words."""
    return xs[0].new_empty(xs[0].shape[:3], dtype=torch.int64)


@Op
def assign_codes(
    codes: Int64[Tensor, "B H N"], centroids: Int64[Tensor, "B H C"], real: Bool[Tensor, "B N"] | None
) -> tuple[Int64[Tensor, "B H N"], Int32[Tensor, "B H C 64"]]:
    """The nearest centroid of each code, and how many members of each centroid have each bit: half a round of k-means.

    The lowest of equally near centroids; C for padding. Bit 63 counts all members. All backends agree.
    """
    return reference.assign_codes(codes, centroids, real)


@assign_codes.compiled
def _(backend: str, codes: Tensor, centroids: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    return labels_and_votes(backend, codes, centroids, real)


@Operator
def labels_and_votes(codes: Tensor, centroids: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Allocate both."""
    votes = codes.new_empty(*centroids.shape, WORD, dtype=torch.int32)
    return torch.empty_like(codes, memory_format=torch.contiguous_format), votes


@Op
def assign_means(
    x: Float[Tensor, "B H N D"],
    mean: Float[Tensor, "B H D"],
    directions: Float[Tensor, "B H D C"],
    halves: Float[Tensor, "B H C"],
    real: Bool[Tensor, "B N"] | None,
) -> Int64[Tensor, "B H N"]:
    """For each vector the cluster with the smallest half − (x − mean)·direction, the lowest of equal ones.

    C for padding. Backends agree up to rounding.
    """
    return reference.assign_means(x.detach(), mean, directions, halves, real)


@assign_means.compiled
def _(backend: str, x: Tensor, mean: Tensor, directions: Tensor, halves: Tensor, real: Tensor | None) -> Tensor:
    return labels_of_means(backend, x.detach(), mean, directions, halves, real)


@Operator
def labels_of_means(x: Tensor, mean: Tensor, directions: Tensor, halves: Tensor, real: Tensor | None) -> Tensor:
    """Allocate the labels."""
    return x.new_empty(x.shape[:3], dtype=torch.int64)


@labels_of_means.flops
def _(given: Any) -> int:
    """Operations of the products."""
    B, H, N, D = given.x
    return 2 * B * H * N * D * given.halves[2]
