"""From a seed to random planes. Nothing here, or anywhere else, draws from the global generator.

What is drawn depends on the seed and the asked size alone, never on batch, length, padding or device: the numbers come
from a CPU generator and then move. (Dropout on attention weights is the exception: it follows torch's own generator,
as every dropout does, so that activation checkpointing replays it.)
"""

import torch
from torch import Tensor


@torch.library.custom_op("subquad::gaussian", mutates_args=())
def _gaussian(seed: int, rows: int, columns: int) -> Tensor:
    # A custom op because Dynamo can trace neither a Generator nor a draw that must come out the same at every call.
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


@_gaussian.register_fake
def _(seed: int, rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.float64)


def gaussian(seed: int, rows: int, columns: int, like: Tensor) -> Tensor:
    """A (rows, columns) matrix of independent N(0, 1) numbers, in `like`'s dtype and on its device.

    >>> import torch
    >>> a, b = (gaussian(7, 3, 4, like=torch.zeros(1)) for _ in range(2))
    >>> torch.equal(a, b)
    True
    """
    return _gaussian(seed, rows, columns).to(device=like.device, dtype=like.dtype)
