"""Table 3 of Linformer: time and memory saved, against a naive softmax as published, and against SDPA."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from subquad.methods.full import EXACT
from subquad.research.papers.base import Cell, Context, Experiment, JobResults
from subquad.research.papers.results import Lines, Results, Table
from subquad.research.papers.side_by_side import alternating_rounds, naive_gib, powers, shown
from subquad.tools.bench.calls import NAIVE, Calls, Load
from subquad.tools.bench.extra_memory import extra_memory
from subquad.tools.measure.timing import Effort

QUANTITIES = ("time", "memory")
SIDES = {NAIVE: "a naive softmax", EXACT: "SDPA"}

PUBLISHED_K = (128, 256, 512, 1024, 2048)
PUBLISHED: dict[str, dict[int, tuple[float, ...]]] = {  # how many times less, by n, for k = 128, 256, …
    "time": {
        512: (1.5, 1.3),
        1024: (1.7, 1.6, 1.3),
        2048: (2.6, 2.4, 2.1, 1.3),
        4096: (3.4, 3.2, 2.8, 2.2, 1.3),
        8192: (5.5, 5.0, 4.4, 3.5, 2.1),
        16384: (8.6, 7.8, 7.0, 5.6, 3.3),
        32768: (13, 12, 11, 8.8, 5.0),
        65536: (20, 18, 16, 14, 7.9),
    },
    "memory": {
        512: (1.7, 1.5),
        1024: (3.0, 2.9, 1.8),
        2048: (6.1, 5.6, 3.6, 2.0),
        4096: (14, 13, 8.3, 4.3, 2.3),
        8192: (28, 26, 17, 8.5, 4.5),
        16384: (56, 48, 32, 16, 8),
        32768: (56, 48, 36, 18, 16),
        65536: (60, 52, 40, 20, 18),
    },
}


@dataclass(frozen=True, kw_only=True)
class LinformerEfficiencyScale:
    """The settings of the measurements of Linformer's efficiency."""

    lengths: tuple[int, ...]
    k: tuple[int, ...] = PUBLISHED_K
    heads: int = 6
    head_dim: int = 64
    gib: float = 1.0  # the batch is the largest with which a naive softmax needs no more
    most: int = 16  # items of a batch
    seconds: float = 1.0  # a call's share of the time that is measured
    limit: float = 12.0  # seconds: a call that is predicted to take longer is not run


SCALES = {
    "smoke": LinformerEfficiencyScale(lengths=(64,), k=(16,), heads=2, head_dim=16, most=2, seconds=0.0),
    "small": LinformerEfficiencyScale(lengths=powers(9, 16)),
    "paper": LinformerEfficiencyScale(lengths=powers(9, 16), heads=12, gib=14.0, most=4096, limit=60.0),
}


def linformer(k: int) -> str:
    """The method: one E and one F for all heads, every token projected."""
    return f"linformer:k={k},ends=pooled"


def load_of(scale: LinformerEfficiencyScale, length: int, device: str = "cpu") -> Load:
    """The largest batch of items with which the N×N matrices fit; one item where not even its own do."""
    one = Load(length, "float32", "forward", 1, scale.heads, scale.head_dim, device, 0)
    return replace(one, batch=max(1, min(scale.most, int(scale.gib / naive_gib(one)))))


def cells(scale: LinformerEfficiencyScale) -> list[Cell]:
    """Times at each length, then memory."""
    times = [Cell(f"time n={length}", partial(_times, scale, length), timed=True) for length in scale.lengths]
    return times + [Cell(f"memory n={length}", partial(_memory, scale, length)) for length in scale.lengths]


def _names(scale: LinformerEfficiencyScale, length: int) -> list[str]:
    """The calls that are run: Linformer where it projects to less than the length, a naive softmax where it fits."""
    exact = [NAIVE, EXACT] if naive_gib(load_of(scale, length)) <= scale.gib else [EXACT]
    return exact + [linformer(k) for k in scale.k if k < length]


def _times(scale: LinformerEfficiencyScale, length: int, context: Context) -> dict[str, Any]:
    """Milliseconds per item, of the calls that were run."""
    load = load_of(scale, length, context.device)
    timed = alternating_rounds(
        lambda n: Calls(replace(load, length=n)),
        length,
        _names(scale, length),
        Effort(seconds=scale.seconds, least=2, enough=5, precision=0.02),
        scale.limit,
        context.device,
    )
    seconds = {name: measured["seconds"] for name, measured in timed.items() if "seconds" in measured}
    return {name: [1e3 * each / load.batch for each in measured] for name, measured in seconds.items()}


def _memory(scale: LinformerEfficiencyScale, length: int, context: Context) -> dict[str, Any]:
    """MiB per item: the peak of one call above its inputs."""
    load, peaks = load_of(scale, length, context.device), {}
    names = _names(scale, length)
    for done, name in enumerate(names):
        context.progress(name, done, len(names))
        peak = extra_memory(load, name).bytes
        if peak:
            peaks[name] = peak / load.batch / 2**20
    return peaks


# ---------------------------------------------------------------------- what comes out


@dataclass
class TimingSeries:
    """A figure by length; what was not measured grows from the longest length that was, and is told apart."""

    power: int
    by_length: dict[int, float] = field(default_factory=dict)

    def at(self, length: int) -> float | None:
        """The figure at a length, as measured or as estimated from the longest length that was measured."""
        if not self.by_length or length < min(self.by_length):
            return None
        longest = max(n for n in self.by_length if n <= length)
        return self.by_length[longest] * (length / longest) ** self.power

    def ratio(self, length: int, measured: float | None) -> str | None:
        """This figure divided by another one's, "~" before it where this one was not measured."""
        value = self.at(length)
        if value is None or not measured:
            return None
        return f"{'' if length in self.by_length else '~'}{shown(value / measured, '×')}"


@dataclass(frozen=True)
class Grid:
    """All that was measured: of each figure and call, by length."""

    scale: LinformerEfficiencyScale
    by_length: Mapping[str, Mapping[str, TimingSeries]]

    @classmethod
    def from_results(cls, scale: LinformerEfficiencyScale, cells: JobResults) -> Grid:
        """From what the cells gave."""
        grid: dict[str, dict[str, TimingSeries]] = {figure: {} for figure in QUANTITIES}
        for n in scale.lengths:
            for name, rounds in cells[f"time n={n}"].items():
                grid["time"].setdefault(name, TimingSeries(2)).by_length[n] = statistics.median(rounds)
            for name, mib in cells[f"memory n={n}"].items():
                grid["memory"].setdefault(name, TimingSeries(1 if name == EXACT else 2)).by_length[n] = mib
        return cls(scale, grid)

    def measured(self, figure: str, name: str, length: int) -> float | None:
        """The measured figure."""
        return self.by_length[figure].get(name, TimingSeries(1)).by_length.get(length)

    def ratio(self, figure: str, against: str, length: int, k: int) -> str | None:
        """The figure of `against`, divided by that of Linformer with this k."""
        return (
            self.by_length[figure]
            .get(against, TimingSeries(1))
            .ratio(length, self.measured(figure, linformer(k), length))
        )


def published(figure: str, length: int, k: int) -> float | None:
    """The paper's, where it has one."""
    row = PUBLISHED[figure].get(length, ())
    column = PUBLISHED_K.index(k) if k in PUBLISHED_K else len(row)
    return row[column] if column < len(row) else None


def results(scale: LinformerEfficiencyScale, records: JobResults) -> Results:
    """Four grids, two of them with the published one's figures, and what the ratios are made of."""
    grid = Grid.from_results(scale, records)
    tables = [_table(grid, figure, against) for against in SIDES for figure in QUANTITIES]
    return Results(
        summary=f"Forward pass, {scale.heads} heads of {scale.head_dim}, one projection for all heads. A batch is the "
        f"largest with which the matrices of a naive softmax take {scale.gib:g} GiB, at most {scale.most} items; all "
        'calls at a length have the same. "~": the other side was not run at this length, and is taken to grow from '
        "the longest that was, by n² (SDPA's memory by n).",
        tables=[*tables, _plain(grid)],
        plots=[_plot(grid, figure) for figure in QUANTITIES],
    )


def _table(grid: Grid, figure: str, against: str) -> Table:
    compared = against == NAIVE
    rows = []
    for n in grid.scale.lengths:
        row = [f"{n:,}"]
        for k in grid.scale.k:
            ours, theirs = grid.ratio(figure, against, n, k), published(figure, n, k)
            row.append((ours or "–") + (f" ({theirs:g}×)" if compared and theirs else ""))
        rows.append(row)
    return Table(
        title=f"{figure.capitalize()} saved against {SIDES[against]}{': ours (published)' if compared else ''}",
        columns=["n \\ k", *map(str, grid.scale.k)],
        rows=rows,
    )


def _plain(grid: Grid) -> Table:
    """The figures that the ratios are made of, for the smallest k."""
    names = {NAIVE: "naive", EXACT: "SDPA", linformer(grid.scale.k[0]): f"k={grid.scale.k[0]}"}
    columns = [f"{name}, {unit}" for unit in ("ms", "MiB") for name in names.values()]
    rows = [
        [
            f"{n:,}",
            load_of(grid.scale, n).batch,
            *(_item(grid.measured(figure, name, n)) for figure in QUANTITIES for name in names),
        ]
        for n in grid.scale.lengths
    ]
    note = (
        "Of one item. Memory is the peak of a call above its inputs, in a process of its own, which tells no less than "
        "about 1 MiB per call apart; E and F, 8·k·n bytes together and the same for all heads, are parameters and do "
        "not count."
    )
    return Table(title="What the ratios are made of", columns=["n", "batch", *columns], rows=rows, note=note)


def _item(value: float | None) -> str | None:
    return None if value is None else f"{value:,.1f}"


def _plot(grid: Grid, figure: str) -> Lines:
    """Ours against both sides and the published, for the smallest k and one in the middle."""
    ks = grid.scale.k
    series: dict[str, list[tuple[float, float]]] = {}
    for k in dict.fromkeys((ks[0], ks[len(ks) // 2])):
        for against, label in SIDES.items():
            other = grid.by_length[figure].get(against, TimingSeries(1))
            pairs = [(n, other.at(n), grid.measured(figure, linformer(k), n)) for n in grid.scale.lengths]
            series[f"{label}: k={k}"] = [
                (float(n), theirs / measured) for n, theirs, measured in pairs if theirs and measured
            ]
        published_label = [(n, published(figure, n, k)) for n in grid.scale.lengths]
        series[f"published: k={k}"] = [(float(n), value) for n, value in published_label if value]
    return Lines(
        file=f"{figure}-saved",
        title=f"{figure} saved",
        x="length n",
        y=f"the other's {figure} / Linformer's",
        series=series,
        levels={"none": 1.0},
        log_x=True,
        log_y=True,
    )


EXPERIMENT = Experiment(
    name="linformer-efficiency",
    title="Time and memory that Linformer saves",
    source="Wang et al. 2020, table 3, section 5.3",
    deviations=(
        "Attention alone, where the paper runs whole models with layerwise sharing: other layers cost the same with "
        "both, so that its ratios are smaller.",
        "Memory saved is that of one batch, where the paper compares the largest batches that fit.",
        "In addition to the naive softmax, the paper's baseline: SDPA, which makes no N×N matrix.",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
)
