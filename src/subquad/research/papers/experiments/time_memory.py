"""Figure 4 of clustered attention: time and memory of a token in forward and backward pass, against the length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from subquad.methods.full import EXACT
from subquad.research.papers.base import Cell, Context, Experiment, JobResults
from subquad.research.papers.results import Lines, Results, Table
from subquad.research.papers.side_by_side import (
    Timed,
    all_rounds,
    alternating_rounds,
    naive_gib,
    powers,
    shown,
    speedup,
)
from subquad.tools.bench.calls import NAIVE, Calls, Load
from subquad.tools.bench.extra_memory import extra_memory
from subquad.tools.bench.settings import BACKWARD
from subquad.tools.measure.fidelity import crossover
from subquad.tools.measure.timing import Effort, Spread, spread

PAPER_METHODS = (
    EXACT,
    NAIVE,
    "reformer:rounds=1",
    "reformer:rounds=4",
    "clustered:clusters=100",
    "i-clustered:clusters=100",
)
PAPER_GIB = 11e9 / 2**30  # of the paper's graphics card


@dataclass(frozen=True, kw_only=True)
class TimeMemoryScale:
    """The settings of the measurements of time and memory."""

    lengths: tuple[int, ...]
    memory_lengths: tuple[int, ...]  # the lengths whose memory is measured too
    tokens: int  # tokens of a batch: tokens // N items, at least one
    methods: tuple[str, ...] = PAPER_METHODS
    heads: int = 6
    head_dim: int = 64
    visits: int = 3  # number for each length, with all others between
    seconds: float = 1.0  # a method's share of a visit
    limit: float = 10.0  # seconds: a call that is predicted to take longer is not run
    gib: float = 4.0  # nor a naive softmax that needs more


SCALES = {
    "smoke": TimeMemoryScale(
        lengths=(64, 128),
        memory_lengths=(64,),
        tokens=128,
        methods=(EXACT, NAIVE, "i-clustered:clusters=8"),
        heads=2,
        head_dim=16,
        visits=1,
        seconds=0.0,
        gib=naive_gib(Load(64, "float32", BACKWARD, 2, 2, 16, "cpu", 0)),
    ),
    "small": TimeMemoryScale(lengths=powers(7, 14), memory_lengths=powers(9, 14), tokens=8192, seconds=0.7),
    "paper": TimeMemoryScale(
        lengths=powers(9, 15), memory_lengths=powers(9, 15), tokens=2**15, limit=60.0, gib=PAPER_GIB
    ),
}


def cells(scale: TimeMemoryScale) -> list[Cell]:
    """Times: each length visited several times. Then memory."""
    times = [
        Cell(f"time N={length} visit={visit}", partial(_times, scale, length), timed=True)
        for visit in range(scale.visits)
        for length in scale.lengths
    ]
    return times + [Cell(f"memory N={length}", partial(_memory, scale, length)) for length in scale.memory_lengths]


def load_of(scale: TimeMemoryScale, length: int, device: str = "cpu") -> Load:
    """Items of this length, as many as a batch has room for."""
    batch = max(1, scale.tokens // length)
    return Load(length, "float32", BACKWARD, batch, scale.heads, scale.head_dim, device, 0)


def _times(scale: TimeMemoryScale, length: int, context: Context) -> dict[str, Any]:
    load = load_of(scale, length, context.device)
    names = [name for name in scale.methods if name != NAIVE or naive_gib(load) <= scale.gib]

    effort = Effort(seconds=scale.seconds, least=2)
    return alternating_rounds(
        lambda n: Calls(replace(load, length=n)), length, names, effort, scale.limit, context.device
    )


def _memory(scale: TimeMemoryScale, length: int, context: Context) -> dict[str, Any]:
    load = load_of(scale, length, context.device)
    peaks = {}
    for done, name in enumerate(scale.methods):
        context.progress(name, done, len(scale.methods))
        if name != NAIVE or naive_gib(load) <= scale.gib:
            peak = extra_memory(load, name)
            peaks[name] = {"bytes": peak.bytes, "how": peak.method}
    return peaks


# ---------------------------------------------------------------------- what comes out


@dataclass(frozen=True)
class Costs:
    """The costs that were found: times in all visits, and memory."""

    scale: TimeMemoryScale
    visits: Mapping[int, Sequence[Timed]]  # by length
    peaks: Mapping[int, Mapping[str, Mapping[str, Any]]]

    @classmethod
    def from_results(cls, scale: TimeMemoryScale, records: JobResults) -> Costs:
        """From what the cells gave."""
        visits = {n: [records[f"time N={n} visit={visit}"] for visit in range(scale.visits)] for n in scale.lengths}
        return cls(scale, visits, {n: records[f"memory N={n}"] for n in scale.memory_lengths})

    def microseconds(self, name: str, length: int) -> Spread | None:
        """A token's time: its quartiles."""
        load = load_of(self.scale, length)
        rounds = all_rounds(self.visits[length], name)
        return spread([1e6 * seconds / (load.batch * length) for seconds in rounds]) if rounds else None

    def bytes(self, name: str, length: int) -> float | None:
        """A token's memory."""
        peak = self.peaks.get(length, {}).get(name, {}).get("bytes")
        return None if peak is None else peak / (load_of(self.scale, length).batch * length)

    def crossing(self, name: str, against: str) -> str:
        """From how many tokens on it is faster."""
        ratios = {n: ratio.median for n in self.scale.lengths if (ratio := speedup(self.visits[n], name, against))}
        at = crossover(ratios)
        if not ratios:
            return "–"
        if at is None:
            return f"not up to {max(ratios):,}"
        return f"at every length, from {min(ratios):,}" if at == min(ratios) else f"from {at:,.0f}"

    def longest(self, name: str) -> str:
        """The most tokens of one item whose memory the paper's card holds, from the longest length measured."""
        measured = {n: each for n in self.scale.lengths if (each := self.bytes(name, n))}
        if not measured:
            return "–"
        n, room = max(measured), PAPER_GIB * 2**30
        fits = n * (room / (measured[n] * n)) ** 0.5 if name == NAIVE else room / measured[n]
        return f"{fits:,.0f}"


def results(scale: TimeMemoryScale, records: JobResults) -> Results:
    """Times and memory per token, and the paper's statements compared with ours."""
    costs = Costs.from_results(scale, records)
    heads = [f"N={n:,}" for n in scale.lengths]
    times = [[name, *(_time(costs.microseconds(name, n)) for n in scale.lengths)] for name in scale.methods]
    memory = [[name, *(shown(costs.bytes(name, n)) for n in scale.lengths)] for name in scale.methods]
    return Results(
        summary=f"Forward and backward pass, {scale.heads} heads of {scale.head_dim}, {scale.tokens:,} tokens per "
        "batch where an item is not longer. `full` is SDPA, which never forms the N×N matrix; `naive` forms it, as the "
        "paper's full attention did.",
        tables=[
            _statements(costs),
            Table(title="µs per token: median (quartiles)", columns=["method", *heads], rows=times, note=_note(costs)),
            Table(title="Bytes per token, peak above the inputs", columns=["method", *heads], rows=memory),
        ],
        plots=_plots(costs),
    )


def _time(time: Spread | None) -> str:
    return "–" if time is None else f"{shown(time.median)} ({shown(time.low)}–{shown(time.high)})"


def _note(costs: Costs) -> str:
    """The calls that were not run, with the reasons, in words."""
    reasons = {
        f"{name} at {n:,} tokens: {visit[name]['reason']}"
        for n, visits in costs.visits.items()
        for visit in visits
        for name in visit
        if "reason" in visit[name]
    }
    tight = f"`naive` is run where its matrices take at most {costs.scale.gib:.3g} GiB."
    return " ".join([tight, *(f"Not run: {reason}." for reason in sorted(reasons))])


def _statements(costs: Costs) -> Table:
    """The paper's statements about its figure, and the results here."""
    published = {"clustered": "1,000", "i-clustered": "2,000"}
    rows = []
    for name in costs.scale.methods:
        if name not in (EXACT, NAIVE):
            published_text = published.get(name.partition(":")[0])
            paper = f"from {published_text}" if published_text else "–"
            rows.append(
                [f"{name} is faster than full", paper, costs.crossing(name, NAIVE), costs.crossing(name, EXACT)]
            )
    held = "tokens of one item that 11 GB hold"
    rows.append([held, "8,192 (whole layer)", costs.longest(NAIVE), costs.longest(EXACT)])
    return Table(
        title="The paper's statements",
        columns=["", "paper", "against a naive softmax", "against SDPA"],
        rows=rows,
        note="Tokens. The last row extrapolates from the longest length measured: a naive softmax by N², SDPA by N.",
    )


def _plots(costs: Costs) -> list[Lines]:
    scale = costs.scale
    times = {name: {n: t for n in scale.lengths if (t := costs.microseconds(name, n))} for name in scale.methods}
    memory = {name: {n: b for n in scale.lengths if (b := costs.bytes(name, n))} for name in scale.methods}
    return [
        Lines(
            file="time-per-token",
            title="time of a token, forward and backward",
            x="tokens N",
            y="µs per token",
            series={name: [(float(n), t.median) for n, t in by_length.items()] for name, by_length in times.items()},
            bands={
                name: [(t.low, t.high) for t in by_length.values()] for name, by_length in times.items() if by_length
            },
            log_x=True,
            log_y=True,
        ),
        Lines(
            file="memory-per-token",
            title="peak memory of a token, forward and backward",
            x="tokens N",
            y="bytes per token",
            series={name: [(float(n), b) for n, b in by_length.items()] for name, by_length in memory.items()},
            log_x=True,
            log_y=True,
        ),
    ]


EXPERIMENT = Experiment(
    name="time-memory",
    title="Time and memory of a token against the length",
    source="Vyas et al. 2020, figure 4, appendix C.1",
    deviations=(
        "Attention alone, without projections and the feed-forward layer, which cost the same with every method.",
        "A constant number of tokens per batch for all methods, where the paper takes each method's largest batch: on "
        "a processor there is no memory to fill.",
        "Full attention is SDPA, and additionally a naive softmax, as in the paper.",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
)
