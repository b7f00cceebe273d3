"""Cells of keys on GPUs: one hash of keys and values side by side, which never lie side by side in memory."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.selection.cells.op import cell_labels, key_cells
from subquad.kernels.selection.hashing.triton import Projected, planes_of, sign_hash
from subquad.kernels.selection.kmeans.triton import KMeansItems, fill_labels, refusal_of_sizes
from subquad.kernels.triton import refusal_of
from subquad.kernels.triton.moments import moments_of


@key_cells.refusal("triton")
def refusal(x: Any) -> str | None:
    """The reason why the kernels cannot take these keys; None if they can."""
    return refusal_of(x.key, x.value) or refusal_of_sizes(x.key.shape[2], x.cells)


@cell_labels.on("triton")
def compute(labels: Tensor, x: Any) -> None:
    """The Triton backend of `key_cells`."""
    D, E = x.key.shape[3], x.value.shape[3]
    planes = planes_of(x.seed, x.bits, D + E, x.key.device)
    of_keys, of_values = moments_of((x.key, x.valid), (x.value, x.valid))
    codes = torch.empty_like(labels)
    keys, values = Projected(x.key, planes[:, :D], of_keys, True), Projected(x.value, planes[:, D:], of_values, True)
    sign_hash(codes, x.valid, keys, values)
    fill_labels(labels, codes, KMeansItems.make(x.valid, None, x.cells, labels), x.iterations)
