"""Cells of keys on GPUs: one hash of keys and values side by side, which never lie side by side in memory."""

from typing import Any

import torch
from torch import Tensor

from subquad.ops.choose.cells.op import cell_labels, key_cells
from subquad.ops.choose.hashing.triton import Projected, sign_hash
from subquad.ops.choose.kmeans.triton import Items, fill_labels, refusal_of_sizes
from subquad.ops.triton import refusal_of
from subquad.ops.triton.moments import moments
from subquad.randomness import orthogonal


@key_cells.refusal("triton")
def refusal(key: Tensor, value: Tensor, *_: object, cells: int, **__: object) -> str | None:
    """Why the kernels cannot take these keys; None where they can."""
    return refusal_of(key, value) or refusal_of_sizes(key.shape[2], cells)


@cell_labels.on("triton")
def compute(labels: Tensor, x: Any) -> None:
    """The Triton backend of `key_cells`."""
    D, E = x.key.shape[3], x.value.shape[3]
    planes = orthogonal(x.seed, x.bits, D + E, like=x.key.new_empty(0).float())
    codes = torch.empty_like(labels)
    sign_hash(codes, x.real, standardised(x.key, x.real, planes[:, :D]), standardised(x.value, x.real, planes[:, D:]))
    fill_labels(labels, codes, Items.of(x.real, None, x.cells, labels), x.iterations)


def standardised(x: Tensor, real: Tensor | None, planes: Tensor) -> Projected:
    """The products of these directions with vectors less their mean, divided by one standard deviation of a head."""
    of = moments(x, real)
    assert of.variance is not None
    deviation = torch.where(of.variance > 0, of.variance.sqrt(), 1.0)
    return Projected(x, planes / deviation[..., None, None], of)
