"""Cells of keys in compiled code."""

from typing import Any

import torch
from torch import Tensor

from subquad.core.randomness import orthogonal
from subquad.kernels.native import interface
from subquad.kernels.selection.cells.op import cell_labels, key_cells


@key_cells.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take these keys; None if it can."""
    return interface.refusal(x.key)


@cell_labels.on("cpu")
def compute(labels: Tensor, x: Any) -> None:
    """The CPU backend of `key_cells`."""
    (B, G, M, D), E, dtype = x.key.shape, x.value.shape[3], x.key.dtype
    interface.check("key_cells", value=(x.value, dtype, (B, G, M, E)), valid=(x.valid, torch.bool, (B, M)))
    cost = B * G * M * (x.cells * (x.iterations + 1) + x.bits * (D + E))
    interface.run(
        "key_cells",
        **{"B": B, "G": G, "M": M, "D": D, "E": E, "dtype": dtype, "threads": interface.threads(cost)},
        **{"cells": x.cells, "bits": x.bits, "iterations": x.iterations, "key": x.key, "value": x.value},
        valid=x.valid,
        planes=orthogonal(x.seed, x.bits, D + E, like=interface.FLOAT32),
        labels=labels,
    )
