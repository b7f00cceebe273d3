"""Ops over a rank's own tokens, for clusters that hold tokens of several ranks. Nothing is differentiated."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.dispatch import Op
from subquad.kernels.selection.shards import reference

WORD = 64  # bits

moments_of = Op(reference.moments_of)
centred_codes = Op(reference.centred_codes)
assign_codes = Op(reference.assign_codes)
assign_means = Op(reference.assign_means)


@moments_of.compiled
def run_moments(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend."""
    mean, squares = means_and_squares.run(backend, x.x.detach(), x.valid)
    return mean, squares


@moments_of.operator("x", "valid")
def means_and_squares(x: Any) -> tuple[Tensor, Tensor]:
    """Allocate both."""
    B, H, _, D = x.x.shape
    return x.x.new_empty(B, H, D, dtype=torch.float64), x.x.new_empty(B, H, dtype=torch.float64)


@centred_codes.compiled
def run_codes(backend: str, x: Any) -> Tensor:
    """Run on a compiled backend."""
    xs, means, factors = ([getattr(term, name) for term in x.terms] for name in ("x", "mean", "factor"))
    words: Tensor = words_of_terms.run(backend, [each.detach() for each in xs], means, factors, x.planes, x.valid)
    return words


LISTS = {"xs": list[Tensor], "means": list[Tensor], "factors": list[Tensor]}


@centred_codes.operator(*LISTS, "planes", "valid", **LISTS)
def words_of_terms(x: Any) -> Tensor:
    """Allocate the words."""
    words: Tensor = x.xs[0].new_empty(x.xs[0].shape[:3], dtype=torch.int64)
    return words


@assign_codes.compiled
def run_assignment(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend."""
    labels, votes = labels_and_votes.run(backend, *x)
    return labels, votes


@assign_codes.operator("codes", "centroids", "valid")
def labels_and_votes(x: Any) -> tuple[Tensor, Tensor]:
    """Allocate both."""
    votes = x.codes.new_empty(*x.centroids.shape, WORD, dtype=torch.int32)
    return torch.empty_like(x.codes, memory_format=torch.contiguous_format), votes


@assign_means.compiled
def run_nearest(backend: str, x: Any) -> Tensor:
    """Run on a compiled backend."""
    labels: Tensor = labels_of_means.run(backend, x.x.detach(), x.mean, x.directions, x.halves, x.valid)
    return labels


@assign_means.operator("x", "mean", "directions", "halves", "valid")
def labels_of_means(x: Any) -> Tensor:
    """Allocate the labels."""
    labels: Tensor = x.x.new_empty(x.x.shape[:3], dtype=torch.int64)
    return labels


@labels_of_means.flops
def nearest_flops(x: Any) -> int:
    """Operations of the products."""
    B, H, N, D = x.x
    flops: int = 2 * B * H * N * D * x.halves[2]
    return flops
