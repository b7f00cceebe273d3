"""Linformer's table 3: time and memory saved, against a naive softmax as published and against SDPA, in the same run.

    python benchmarks/linformer_grid.py [--lengths 512 … 65536] [--k 128 … 2048] [--limit 12] [--gib 8] [--out FILE.md]

A quadratic call that is foretold to take more than --limit seconds, or a naive one more than --gib of memory, is not
run: its figure is that of the longest length that was, times the square of the ratio of the lengths, and marked "~".
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import sheet
import torch

QUADRATIC = ("naive", "full")
NAMES = {"naive": "a naive softmax", "full": "SDPA"}


@dataclass
class Series:
    """A figure by length; what was not measured grows from the longest length that was, and is told apart."""

    power: int
    found: dict[int, float] = field(default_factory=dict)

    def foretold(self, length: int) -> float:
        """What it should be at a length, from the longest measured one; 0 where there is none."""
        if not self.found:
            return 0.0
        longest = max(self.found)
        return self.found[longest] * (length / longest) ** self.power

    def ratio(self, length: int, own: float) -> str:
        """This figure divided by another one's."""
        known = length in self.found
        value = (self.found[length] if known else self.foretold(length)) / own
        return f"{'' if known else '~'}{value:.1f}×" if value < 10 else f"{'' if known else '~'}{value:,.0f}×"


def linformer(k: int) -> str:
    """The method: one E and one F for all heads, every token projected."""
    return f"linformer:k={k},ends=pooled"


class Grid:
    """Times and memory of all lengths, the shortest first."""

    def __init__(self, ks: Sequence[int], limit: float, gib: float, seconds: float):
        self.ks, self.limit, self.gib, self.seconds = ks, limit, gib, seconds
        self.ms = {"naive": Series(2), "full": Series(2)}
        self.mib = {"naive": Series(2), "full": Series(1)}
        self.own: dict[tuple[str, int, int], float] = {}  # (figure, length, k)

    def measure(self, length: int) -> None:
        """One row of both tables."""
        load, threads = sheet.load_of(length), torch.get_num_threads()
        ks = [k for k in self.ks if k < length]
        exact = [name for name in QUADRATIC if self.affordable(name, length)]
        calls = {name: sheet.call_of(load, name) for name in exact} | {
            linformer(k): sheet.call_of(load, linformer(k)) for k in ks
        }
        times = sheet.milliseconds(calls, self.seconds)
        for name in exact:
            self.ms[name].found[length] = statistics.median(times[name])
            peak = sheet.peak_alone(load, name, threads)
            self.mib[name].found |= {length: peak / 2**20} if peak else {}
        for k in ks:
            self.own["time", length, k] = statistics.median(times[linformer(k)])
            self.own["memory", length, k] = (sheet.peak_alone(load, linformer(k), threads) or 0) / 2**20

    def affordable(self, name: str, length: int) -> bool:
        """Whether a quadratic call is worth its time and fits."""
        fits = name != "naive" or self.mib[name].foretold(length) <= 1024 * self.gib
        return fits and self.ms[name].foretold(length) <= 1000 * self.limit

    def table(self, figure: str, against: str, lengths: Sequence[int]) -> str:
        """How many times less time, or memory, for each length and k."""
        exact = (self.ms if figure == "time" else self.mib)[against]
        rows = [[f"{n:,}", *(self._cell(exact, figure, n, k) for k in self.ks)] for n in lengths]
        return sheet.table(["n \\ k", *map(str, self.ks)], rows)

    def _cell(self, exact: Series, figure: str, length: int, k: int) -> str:
        own = self.own.get((figure, length, k))
        return exact.ratio(length, own) if own else sheet.MISSING

    def plain(self, lengths: Sequence[int]) -> str:
        """The figures that the ratios are made of, for the smallest k."""
        rows = []
        for n in lengths:
            row = [f"{n:,}"]
            for series, figure in ((self.ms, "time"), (self.mib, "memory")):
                row += [
                    f"{series[name].found[n]:,.1f}" if n in series[name].found else sheet.MISSING for name in QUADRATIC
                ]
                own = self.own.get((figure, n, self.ks[0]))
                row.append(sheet.MISSING if own is None else f"{own:,.1f}")
            rows.append(row)
        names = ("naive", "SDPA", f"k={self.ks[0]}")
        return sheet.table(["n", *(f"{name}, {unit}" for unit in ("ms", "MiB") for name in names)], rows)


def main() -> None:
    lengths = tuple(2**power for power in range(9, 17))
    parser = sheet.arguments(__doc__, lengths, k=(128, 256, 512, 1024, 2048), limit=12.0, gib=8.0, seconds=2.0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    lengths = sorted(given.lengths)
    grid = Grid(given.k, given.limit, given.gib, given.seconds)
    for length in lengths:
        grid.measure(length)
    parts = [
        "Forward, batch 1, 6 heads of 64; all in turn at each length, medians. Memory: the peak of one call above its "
        "inputs, in a process of its own, which tells no less than about 1 MiB apart; E and F, 8·k·n bytes together "
        'and the same for all heads, are parameters and do not count. "~": the other side was not run at this length, '
        "and is taken to grow from the longest that was, by n² (SDPA's memory by n). A call was run if it was foretold "
        f"to take at most {given.limit:g} s, and the naive one {given.gib:g} GiB."
    ]
    for against in QUADRATIC:
        for figure in ("time", "memory"):
            parts += [f"## {figure.capitalize()} saved against {NAMES[against]}", grid.table(figure, against, lengths)]
    parts += ["## What the ratios are made of", grid.plain(lengths)]
    sheet.publish("Linformer's table 3", parts, given.out)


if __name__ == "__main__":
    main()
