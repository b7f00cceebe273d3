"""Sign hashes in compiled code."""

from typing import Any

import torch
from torch import Tensor

from subquad.core.randomness import orthogonal
from subquad.kernels.native import interface
from subquad.kernels.selection.hashing.op import hash_codes, hash_words


@hash_codes.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take these vectors; None if it can."""
    return interface.refusal(x.x)


@hash_words.on("cpu")
def compute(codes: Tensor, inputs: Any) -> None:
    """The CPU backend of `hash_codes`."""
    x, bits = inputs.x, inputs.bits
    B, H, N, D = x.shape
    interface.check("hash_codes", valid=(inputs.valid, torch.bool, (B, N)))
    interface.run(
        "hash",
        **{"B": B, "H": H, "N": N, "D": D, "bits": bits, "centre": inputs.centre, "dtype": x.dtype},
        threads=interface.threads(2 * B * H * bits * N * D),
        x=x,
        valid=inputs.valid,
        planes=orthogonal(inputs.seed, bits, D, like=interface.FLOAT32),
        codes=codes,
    )
