"""From the results of a benchmark's units to its report."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any

import subquad as sq
from subquad.methods import Method
from subquad.methods.full import EXACT
from subquad.tools.bench.calls import Load
from subquad.tools.bench.crossovers import by_length, crossovers, growth, names, panels
from subquad.tools.bench.run import MEMORY, TIME, Bench
from subquad.tools.bench.schema import BenchCell, BenchReport
from subquad.tools.measure.noise import AGAIN, TIE, against_itself, at_least_typical, noise_of, verdict
from subquad.tools.measure.timing import beside, ratios, speedup, spread
from subquad.tools.runs import machine
from subquad.tools.runs.options import as_command


def report_of(bench: Bench) -> BenchReport:
    """All figures, with what they depend on."""
    s = bench.settings
    by_load = _noise(bench)
    cells = _cells(bench, by_load)
    uses = [visit.use for visit in bench.results.all(TIME)]
    return BenchReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=as_command("bench", s),
        versions=bench.versions,
        hardware=bench.hardware,
        backend=bench.backend,
        backends=sq.backends(),
        settings={name: value for name, value in asdict(s).items() if name not in ("methods", "plans")}
        | {
            "lengths": sorted(set(s.lengths)),
            "passes": list(dict.fromkeys(s.passes)),
            "dtypes": list(dict.fromkeys(s.dtypes)),
            "threads": int(bench.hardware["threads"]),
        },
        methods={str(method): method.to_dict() for method in bench.methods},
        cells=cells,
        crossovers=crossovers(cells),
        notes=_notes(bench),
        noise=noise_of(machine.load(bench.load_average, uses), list(by_load.values())),
    )


# ---------------------------------------------------------------------- cells


def _noise(bench: Bench) -> dict[Load, float]:
    """The factor by which SDPA differs from itself at each length, raised to the median of the panel's lengths.

    By the medians of visits or the quartiles of all rounds, whichever are farther from 1: where the system takes the
    processor away in about half of the calls, medians jump between two values, and those of three visits may agree.
    """
    noise: dict[Load, float] = {}
    for load in bench.loads:
        if exact := bench.visits(load, EXACT):
            again = bench.visits(load, AGAIN)
            rounds = spread(ratios(list(chain(*again)), list(chain(*exact))))
            noise[load] = max(against_itself(_by_visit(again, exact)), rounds.high, 1 / rounds.low)
    in_panels: dict[Load, float] = {}
    for panel in {(load.dtype, load.passes) for load in noise}:
        in_panels |= at_least_typical({load: noise[load] for load in noise if (load.dtype, load.passes) == panel})
    return in_panels


def _by_visit(times: list[list[float]], exact: list[list[float]]) -> list[float]:
    """The median speed-up of each visit: rounds that follow each other agree better than visits do."""
    return [speedup(mine, theirs) for mine, theirs in zip(times, exact, strict=True)]


def _cells(bench: Bench, noise: Mapping[Load, float]) -> list[BenchCell]:
    cells = [_cell(bench, load, method, noise) for load in bench.loads for method in bench.methods]
    exponents = {
        (*panel, name): growth(by_length(cells, panel, name, "ms")) for panel in panels(cells) for name in names(cells)
    }
    return [replace(cell, growth=exponents[cell.dtype, cell.passes, cell.method].get(cell.length)) for cell in cells]


def _cell(bench: Bench, load: Load, method: Method, noise: Mapping[Load, float]) -> BenchCell:
    rounds, exact, reason = bench.visits(load, str(method)), bench.visits(load, EXACT), bench.reason(load, method)
    measured = partial(BenchCell, str(method), load.dtype, load.passes, load.length)
    if reason:
        return measured("not run", reason)
    seconds, tokens = list(chain(*rounds)), load.batch * load.length
    ms = spread(seconds)
    compared: dict[str, Any] = {}
    if exact:
        visits = _by_visit(rounds, exact)
        times, faster = beside(seconds, list(chain(*exact)))
        compared = {"speedup": faster.median, "speedup_low": faster.low, "speedup_high": faster.high, "visits": visits}
        if str(method) == EXACT:
            compared["noise"] = noise[load]
        else:
            ms = times
            compared["verdict"] = verdict(faster.median, visits, noise[load])
    peak = None if bench.settings.quick else bench.results[MEMORY(load.key, method)]
    return measured(
        "measured",
        **compared,
        ms=1e3 * ms.median,
        ms_low=1e3 * ms.low,
        ms_high=1e3 * ms.high,
        repeats=len(seconds),
        us_per_token=1e6 * ms.median / tokens,
        extra_bytes=None if peak is None else peak.bytes,
        memory=None if peak is None else peak.method,
        bytes_per_token=None if peak is None or peak.bytes is None else peak.bytes / tokens,
    )


# ---------------------------------------------------------------------- what a reader must know


def _notes(bench: Bench) -> list[str]:
    s = bench.settings
    notes = [
        f"{EXACT} is torch's scaled_dot_product_attention, called directly. In every round, it and the methods run "
        "in a random order, on standard normal inputs; warm-up rounds are excluded.",
        "A speed-up is the median over rounds of SDPA's time divided by the method's in the same round; a time is "
        "SDPA's median time divided by the speed-up.",
        "A method counts as faster or slower if its speed-up differs from 1 by more than SDPA, timed twice in each "
        f"round, differs from itself (and by more than {TIE:g}×), and the medians of all visits lie on one side of 1.",
    ]
    if s.quick:
        notes.append("A quick run: few rounds, memory not measured.")
    else:
        notes.append(
            "Extra memory is the peak of one call in a separate process, in addition to the inputs. The output and "
            "the gradients count. Differences below about 1 MiB are not resolved."
        )
    if bench.executor:
        notes.append(f"Run by {bench.executor}; what measures time had all cores of such a machine to itself.")
    return notes + bench.resumed_note
