"""Sign hashes in compiled code."""

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
def compute(codes: Tensor, x: Tensor, bits: int, seed: int, centre: bool, real: Tensor | None) -> None:
    """As `hash_codes`."""
    interface.check("hash_codes", real=(real, torch.bool, (x.shape[0], x.shape[2])))
    x, real = with_contiguous_rows(x), None if real is None else real.contiguous()
    planes = orthogonal(seed, bits, x.shape[3], like=interface.FLOAT32)
    sizes = interface.sizes(x, x, x, clusters=bits, topk=0, iterations=0)
    interface.run(
        "hash", interface.Hashing(sizes, rows(x), pointer(real), pointer(planes), bits, centre, pointer(codes))
    )
