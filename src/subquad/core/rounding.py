"""Division that rounds up."""

from typing import TypeVar

from torch import Tensor

Count = TypeVar("Count", int, Tensor)


def ceil_div(count: Count, size: int) -> Count:
    """⌈count / size⌉ of a count that is not negative.

    As a sum, not as `-(-count // size)`: `torch.onnx.export` translates `//` of symbolic lengths into a division that
    truncates, which rounds a negative number in the other direction.

    >>> ceil_div(48, 16), ceil_div(49, 16)
    (3, 4)
    """
    return (count + size - 1) // size
