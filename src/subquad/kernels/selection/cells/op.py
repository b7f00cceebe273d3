"""The op `key_cells`."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.dispatch import Op
from subquad.kernels.selection.cells import reference
from subquad.kernels.selection.hashing.op import hash_codes
from subquad.kernels.selection.kmeans.op import hamming_kmeans

ITERATIONS_OF_KEYS = 5  # of k-means, where the keys alone count


key_cells = Op(reference.key_cells)


def cells_of_keys(
    key: Float[Tensor, "B G M D"], valid: Bool[Tensor, "B M"] | None, *, cells: int, seed: int
) -> Int64[Tensor, "B G M"]:
    """Like `key_cells`, by the keys alone."""
    codes = hash_codes(key, reference.BITS, seed, centre=True, valid=valid)
    return hamming_kmeans(codes, valid, cells, reference.BITS, ITERATIONS_OF_KEYS)


@key_cells.compiled
def run(backend: str, x: Any) -> Tensor:
    """Run on a compiled backend: nothing is differentiated."""
    settings = x.cells, x.bits, x.iterations, x.seed
    key, value = x.key.detach(), x.value.detach()
    if x.valid is None and key.stride(0) == value.stride(0) == 0:  # all items are the same
        key, value = key[:1], value[:1]
    labels: Tensor = cell_labels.run(backend, key, value, x.valid, *settings)
    return labels.expand(x.key.shape[0], -1, -1)


@key_cells.operator("key", "value", "valid", "cells", "bits", "iterations", "seed")
def cell_labels(x: Any) -> Tensor:
    """Allocate the labels."""
    if x.cells < 1:
        raise ValueError(f"key_cells: cells={x.cells}, but there must be 1 at least")
    labels: Tensor = x.key.new_empty(x.key.shape[:3], dtype=torch.int64)
    return labels
