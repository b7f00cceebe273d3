"""Sign hashes in compiled code."""

import torch
from torch import Tensor

from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, with_contiguous_rows
from subquad.randomness import orthogonal


def refusal(x: Tensor) -> str | None:
    """Why the compiled kernel cannot take these vectors; None where it can."""
    return interface.refusal(x)


@torch.library.custom_op("subquad::hash_codes", mutates_args=(), device_types="cpu")
def hash_codes(x: Tensor, bits: int, seed: int, centre: bool, real: Tensor | None) -> Tensor:
    """As `subquad.ops.hashing.hash_codes`."""
    interface.check("hash_codes", real=(real, torch.bool, (x.shape[0], x.shape[2])))
    x, real = with_contiguous_rows(x), None if real is None else real.contiguous()
    planes = orthogonal(seed, bits, x.shape[3], like=interface.FLOAT32)
    codes = x.new_empty(x.shape[:3], dtype=torch.int64)
    sizes = interface.sizes(x, x, x, clusters=bits, topk=0, iterations=0)
    interface.run(
        "hash", interface.Hashing(sizes, rows(x), pointer(real), pointer(planes), bits, centre, pointer(codes))
    )
    return codes


@hash_codes.register_fake
def _(x: Tensor, bits: int, seed: int, centre: bool, real: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[:3], dtype=torch.int64)
