"""Numbers in parts, and the positions of the parts."""

from collections.abc import Iterable


def even_shares(number: int, parts: int) -> tuple[int, ...]:
    """A number in parts that differ by 1 at most, the larger ones first."""
    return tuple(number // parts + (part < number % parts) for part in range(parts))


def spans(lengths: Iterable[int]) -> list[slice]:
    """The ranges of consecutive parts of these lengths."""
    slices, start = [], 0
    for length in lengths:
        slices.append(slice(start, start + length))
        start += length
    return slices
