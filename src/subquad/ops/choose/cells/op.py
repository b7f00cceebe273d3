"""The op `key_cells`."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.ops.backends import Op, Operator
from subquad.ops.choose.cells import reference
from subquad.ops.choose.hashing.op import hash_codes
from subquad.ops.choose.kmeans.op import hamming_kmeans

BITS = 63  # of the hashes that cells are made from
ITERATIONS = 3  # of their k-means; more change the error by less than one percent
ITERATIONS_OF_KEYS = 5  # where the keys alone count, as in earlier versions


@Op
def key_cells(
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    real: Bool[Tensor, "B M"] | None,
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
    return reference.key_cells(key, value, real, cells=cells, bits=bits, iterations=iterations, seed=seed)


def cells_of_keys(
    key: Float[Tensor, "B G M D"], real: Bool[Tensor, "B M"] | None, *, cells: int, seed: int
) -> Int64[Tensor, "B G M"]:
    """Like `key_cells`, by the keys alone."""
    codes = hash_codes(key, BITS, seed, centre=True, real=real)
    return hamming_kmeans(codes, real, cells, BITS, ITERATIONS_OF_KEYS)


@key_cells.compiled
def _(
    backend: str,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    *,
    cells: int,
    seed: int,
    bits: int = BITS,
    iterations: int = ITERATIONS,
) -> Tensor:
    return cell_labels(backend, key.detach(), value.detach(), real, cells, bits, iterations, seed)


@Operator
def cell_labels(
    key: Tensor, value: Tensor, real: Tensor | None, cells: int, bits: int, iterations: int, seed: int
) -> Tensor:
    """Allocate the labels."""
    if cells < 1:
        raise ValueError(f"key_cells: cells={cells}, but there must be 1 at least")
    return key.new_empty(key.shape[:3], dtype=torch.int64)
