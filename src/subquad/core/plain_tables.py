"""Tables as plain text, for objects that print as one."""

import re
from collections.abc import Hashable, Sequence

from rich.console import Console
from rich.table import Table

MOST_RANGES = 5


def alike(names: Sequence[str], features: Sequence[Hashable]) -> list[list[int]]:
    """The indices of layers whose names differ in numbers only and whose features are equal, in groups.

    >>> alike(["layers.0.a", "layers.1.a", "layers.2.a"], ["x", "y", "x"])
    [[0, 2], [1]]
    """
    groups: dict[Hashable, list[int]] = {}
    for index, (name, feature) in enumerate(zip(names, features, strict=True)):
        groups.setdefault((re.sub(r"\d+", "*", name), feature), []).append(index)
    return list(groups.values())


def common_name(names: Sequence[str]) -> str:
    """One name for names that differ in numbers only, with * where they differ.

    >>> common_name(["layer1.0.a", "layer1.11.a"])
    'layer1.*.a'
    """
    pieces = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(piece[0] if len(set(piece)) == 1 else "*" for piece in pieces)


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in order as ranges, five at most.

    >>> ranges([0, 1, 2, 4, 6, 7])
    '0 to 2, 4, 6 to 7'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs[:MOST_RANGES]]
    return ", ".join([*shown, *(["…"] if len(runs) > MOST_RANGES else [])])


def as_text(table: Table) -> str:
    """The table at 120 columns, without colours and without spaces at the line ends."""
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
