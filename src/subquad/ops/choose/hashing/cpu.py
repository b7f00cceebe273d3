"""Sign hashes in compiled code."""

from typing import Any

import torch
from torch import Tensor

from subquad.ops.choose.hashing.op import hash_codes, hash_words
from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, with_contiguous_rows
from subquad.randomness import orthogonal


@hash_codes.refusal("cpu")
def refusal(x: Tensor, *_: object, **__: object) -> str | None:
    """Why the compiled kernel cannot take these vectors; None where it can."""
    return interface.refusal(x)


@hash_words.on("cpu")
def compute(codes: Tensor, given: Any) -> None:
    """As `hash_codes`."""
    x, bits, real = with_contiguous_rows(given.x), given.bits, given.real
    interface.check("hash_codes", real=(real, torch.bool, (x.shape[0], x.shape[2])))
    real = None if real is None else real.contiguous()
    planes = orthogonal(given.seed, bits, x.shape[3], like=interface.FLOAT32)
    sizes = interface.sizes(x, x, x, clusters=bits, topk=0, iterations=0)
    interface.run(
        "hash", interface.Hashing(sizes, rows(x), pointer(real), pointer(planes), bits, given.centre, pointer(codes))
    )
