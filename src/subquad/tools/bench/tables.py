"""A benchmark in the terminal and in Markdown."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from subquad.methods.full import EXACT
from subquad.tools.bench.crossovers import Panel, cells_of, names, panels, ran
from subquad.tools.bench.schema import BenchCell, BenchReport, Change, Changes, Crossover
from subquad.tools.report import cells
from subquad.tools.report.cells import Cell, Tone
from subquad.tools.report.content import Column, Line, ReportTable, pieces, text_of
from subquad.tools.report.markup import bullets, escaped, fenced, noise_line, pairs_table, sections, table_of
from subquad.tools.report.terminal import TONES, Parts, rich_of, ruled

HEADS = ("ms", "±", "speed-up", "quartiles", "µs/token", "growth", "MiB")
LEGEND = (
    "ms: SDPA's median / the speed-up. ±: half the distance of the quartiles, of the median. speed-up: SDPA's time / "
    "the method's, in the same round, and its quartiles; ≈ within the noise of this run, ↓ slower. growth: exponent of "
    "the time from the length above. MiB: peak extra memory of a call."
)
NO_FIDELITY = "The inputs are random, so these times have no fidelity. `subquad compare` measures what a method loses."


def rich_table(report: BenchReport) -> RenderableType:
    """A table for each dtype and passes, crossovers, and what changed; in 80 columns each is in one part."""
    parts: list[RenderableType] = []
    for panel in panels(report.cells):
        parts += [Text(f"\n{title(report, panel)}", "bold"), _terminal(report.cells, panel)]
        parts += [Text(f"• {line}") for line in _conclusions(report, panel)]
    parts.append(Text(f"\n{LEGEND} {NO_FIDELITY}", "dim"))
    if noise := report.noise:
        parts.append(Text(noise.says, "yellow" if noise.busy else "dim"))
    if report.changes is not None:
        parts += _changes(report.changes)
    return Group(*parts)


def markdown(report: BenchReport, plots: Sequence[str] = ()) -> str:
    """All of a benchmark as Markdown. `plots` are the names of the plots that lie next to it."""
    parts = ["# Time and memory against length", noise_line(report.noise), NO_FIDELITY]
    parts += [f"![{name}]({name})" for name in plots]
    for panel in panels(report.cells):
        parts += [f"## {escaped(title(report, panel))}", table_of(_full_table(report.cells, panel))]
        parts.append(bullets(_conclusions(report, panel)))
    if (changes := report.changes) is not None:
        parts += ["## Changes", bullets(_summary(changes)), table_of(_change_table(changes.cells))]
    parts += sections({"Settings": report.settings, "Hardware": report.hardware, "Versions": report.versions})
    parts += ["## Backends", f"In use: {escaped(report.backend)}.", pairs_table(list(report.backends.items()))]
    parts += [
        "## Methods",
        pairs_table([(name, text_of(name, settings)) for name, settings in report.methods.items()]),
    ]
    parts += ["## Notes", bullets(report.notes), "## Command", fenced(report.command), escaped(report.created)]
    return "\n\n".join(part for part in parts if part) + "\n"


def title(report: BenchReport, panel: Panel) -> str:
    """The title of a panel."""
    s, (dtype, passes) = report.settings, panel
    causal = "causal, " if s["causal"] else ""
    return f"{passes}, {dtype}: {causal}batch {s['batch']}, {s['heads']} heads of {s['head_dim']}, on {s['device']}"


# ---------------------------------------------------------------------- figures


def _row(cell: BenchCell) -> list[Cell]:
    """The row of a table for a measured cell, below HEADS."""
    extra = cells.known(cell.extra_bytes)
    exact = cell.method == EXACT
    return [
        cells.size(cell.ms),
        _noise(cell),
        Cell("") if exact else cells.speedup(cell.speedup, cell.verdict),
        Cell("") if exact else _between(cell.speedup_low, cell.speedup_high),
        cells.size(cell.us_per_token),
        cells.number(cell.growth, 2),
        cells.size(None if extra is None else extra / 2**20),
    ]


def _noise(cell: BenchCell) -> Cell:
    low, median, high = (cells.known(figure) for figure in (cell.ms_low, cell.ms, cell.ms_high))
    if low is None or median is None or high is None:
        return Cell(cells.MISSING, "missing")
    return Cell(f"{50 * (high - low) / median:.0f}%")


def _between(low: float | None, high: float | None) -> Cell:
    if low is None or high is None:
        return Cell(cells.MISSING, "missing")
    return Cell("–".join(cells.speedup(x).text.strip("↓×") for x in (low, high)))


def _conclusions(report: BenchReport, panel: Panel) -> Iterator[str]:
    """Crossovers, and what was not run."""
    for crossover in report.crossovers:
        if (crossover.dtype, crossover.passes) == panel and ran(report.cells, panel, crossover.method):
            yield f"{crossover.method}: {_crossing(crossover)}"
    reasons: dict[tuple[str, str], list[int]] = {}
    for name in names(report.cells):
        for cell in cells_of(report.cells, panel, name):
            if cell.status == "not run":
                reasons.setdefault((name, cell.reason or "no reason given"), []).append(cell.length)
    for (name, reason), lengths in reasons.items():
        yield f"{name} at {', '.join(f'{n:,}' for n in lengths)} tokens: not run: {reason}"


def _crossing(crossover: Crossover) -> str:
    tokens = crossover.tokens
    if crossover.state == "at" and tokens is not None:
        return f"faster than SDPA from about {cells.two_digits(tokens):,} tokens on{_ties(crossover)}"
    if crossover.state == "at or below" and tokens is not None:
        return f"faster than SDPA from at most {tokens:,.0f} tokens on{_ties(crossover)}"
    if crossover.state == "below the shortest":
        return f"faster than SDPA at every length, from {crossover.shortest:,} tokens on"
    if crossover.state == "not reached":
        return f"not clearly faster than SDPA up to {crossover.longest:,} tokens{_ties(crossover)}"
    return "no speed-up is known: SDPA was not run at these lengths"


def _ties(crossover: Crossover) -> str:
    """The lengths at which the speed-up is within the noise."""
    lengths = ", ".join(f"{n:,}" for n in crossover.ties or [])
    return f"; within the noise at {lengths}" if lengths else ""


def _shown(of_panel: Sequence[BenchCell], panel: Panel) -> list[str]:
    """SDPA, and the methods with a figure; the reasons of the others are below the table."""
    return [name for name in names(of_panel) if name == EXACT or ran(of_panel, panel, name)]


# ---------------------------------------------------------------------- terminal


def _terminal(of_panel: Sequence[BenchCell], panel: Panel) -> Parts:
    def part(columns: Sequence[int]) -> RichTable:
        table = ruled()
        table.add_column("tokens", overflow="fold")
        for i in columns:
            table.add_column(HEADS[i], justify="right", no_wrap=True)
        for name in _shown(of_panel, panel):
            shown = f"{EXACT} (SDPA)" if name == EXACT else "\n  ".join(pieces(name))
            table.add_row(Text(shown, "bold cyan"))
            for cell in cells_of(of_panel, panel, name):
                row = _row(cell)
                table.add_row(f"{cell.length:>9,}", *(Text(row[i].text, TONES[row[i].tone]) for i in columns))
        return table

    return Parts(part, [""] * len(HEADS))


def _changes(changes: Changes) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(f"\nAgainst {changes.old} of {changes.created}", "bold")]
    lines += [Text(f"• {line}") for line in _summary(changes)]
    changed = [change for change in changes.cells if change.verdict in ("faster", "slower")]
    if not changed:
        return lines
    rows = []
    for change in changed:
        name = f"{change.method}, {change.length:,}, {change.dtype}, {change.passes}"
        tone: Tone = "faster" if change.verdict == "faster" else "slower"
        rows.append(Line(name, [Cell(cell.text, tone) for cell in _change_row(change)[1:5]]))
    heads = [Column(head) for head in ("speed-up then", "now", "ratio", "time")]
    return [*lines, rich_of(ReportTable(heads, rows, first="cell"), False)]


# ---------------------------------------------------------------------- Markdown


def _full_table(chosen: Sequence[BenchCell], panel: Panel) -> ReportTable:
    heads = ("tokens", *HEADS, "bytes/token", "rounds")
    lines = []
    for name in _shown(chosen, panel):
        for cell in cells_of(chosen, panel, name):
            details = [cells.number(getattr(cell, figure), 0) for figure in ("bytes_per_token", "repeats")]
            row = [Cell(f"{cell.length:,}"), *_row(cell), *details]
            lines.append(Line(f"{name} (SDPA)" if name == EXACT else name, row))
    return ReportTable([Column(head) for head in heads], lines)


def _change_table(changes: Sequence[Change]) -> ReportTable:
    heads = ["dtype", "passes", "tokens", "verdict", "speed-up then", "now", "ratio"]
    heads += ["time then / now", "memory now / then"]
    lines = [Line(c.method, [Cell(c.dtype), Cell(c.passes), Cell(f"{c.length:,}"), *_change_row(c)]) for c in changes]
    return ReportTable([Column(head) for head in heads], lines)


def _change_row(change: Change) -> list[Cell]:
    ratios = (change.speedup_ratio, change.time_ratio, change.memory_ratio)
    speedups = map(cells.speedup, change.speedups)
    return [Cell(change.verdict), *speedups, *(cells.number(ratio, 2) for ratio in ratios)]


def _summary(changes: Changes) -> Iterator[str]:
    counts = dict.fromkeys(("faster", "slower", "within the noise"), 0)
    for change in changes.cells:
        if change.verdict in counts:
            counts[change.verdict] += 1
    yield (
        "; ".join(f"{count} {verdict}" for verdict, count in counts.items())
        + f" (a change counts above {100 * changes.tolerance:.0f} % and beyond the quartiles and visits of both "
        "runs)"
    )
    for run, alone in (("the earlier run", changes.only_old), ("this run", changes.only_new)):
        if alone:
            yield f"{len(alone)} cells are in {run} only: {'; '.join(alone[:4])}{' …' * (len(alone) > 4)}"
    yield from (f"differs: {note}" for note in changes.notes)
