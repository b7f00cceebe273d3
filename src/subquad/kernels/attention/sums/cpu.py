"""Sums of groups in compiled code."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.sums.op import group_sums, sums_and_sizes
from subquad.kernels.native import interface


@group_sums.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take these vectors; None if it can."""
    return interface.refusal(x.x)


@sums_and_sizes.on("cpu")
def compute(outputs: tuple[Tensor, Tensor], inputs: Any) -> None:
    """The CPU backend of `group_sums`."""
    B, H, N, D = inputs.x.shape
    interface.check("group_sums", labels=(inputs.labels, torch.int64, (B, H, N)))
    interface.run(
        "group_sums",
        **{"B": B, "H": H, "N": N, "D": D, "groups": inputs.groups, "dtype": inputs.x.dtype},
        threads=interface.threads(B * H * N * D),
        **{"x": inputs.x, "labels": inputs.labels, "sums": outputs[0], "sizes": outputs[1]},
    )
