"""From the results of a benchmark's units to its report."""

import shlex
import statistics
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import subquad as sq
from subquad.measure.timing import ratios, spread
from subquad.methods import Method
from subquad.report.bench_figures import by_length, crossovers, growth, names, of, panels
from subquad.report.bench_schema import EXACT, KIND, SCHEMA, BenchCell, BenchReport
from subquad.workflows.bench import Bench, Settings
from subquad.workflows.bench_calls import Load

# command-line option -> setting
OPTIONS = {
    "--lengths": "lengths",
    "--passes": "passes",
    "--dtypes": "dtypes",
    "--device": "device",
    "--batch": "batch",
    "--heads": "heads",
    "--head-dim": "head_dim",
    "--threads": "threads",
    "--seed": "seed",
    "--call-limit": "call_limit",
}


def report_of(bench: Bench) -> BenchReport:
    """All figures, with what they depend on."""
    s = bench.settings
    cells = _cells(bench)
    return {
        "kind": KIND,
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(s),
        "versions": bench.versions,
        "hardware": bench.hardware,
        "backend": bench.backend,
        "backends": sq.backends(),
        "settings": {
            "lengths": sorted(set(s.lengths)),
            "passes": list(dict.fromkeys(s.passes)),
            "dtypes": list(dict.fromkeys(s.dtypes)),
            "device": s.device,
            "batch": s.batch,
            "heads": s.heads,
            "head_dim": s.head_dim,
            "threads": int(bench.hardware["threads"]),
            "seed": s.seed,
            "causal": s.causal,
            "call_limit": s.call_limit,
            "quick": s.quick,
        },
        "methods": {str(method): method.to_dict() for method in bench.methods},
        "cells": cells,
        "crossovers": crossovers(cells),
        "notes": _notes(bench),
    }


# ---------------------------------------------------------------------- cells


def _cells(bench: Bench) -> list[BenchCell]:
    cells = [_cell(bench, load, method) for load in bench.loads for method in bench.methods]
    for panel in panels(cells):
        for name in names(cells):
            exponents = growth(by_length(cells, panel, name, "ms"))
            for cell in of(cells, panel, name):
                if cell["length"] in exponents:
                    cell["growth"] = exponents[cell["length"]]
    return cells


def _cell(bench: Bench, load: Load, method: Method) -> BenchCell:
    own, exact = bench.timed(load, method), bench.timed(load, bench.methods[0])
    cell: BenchCell = {
        "method": str(method),
        "dtype": load.dtype,
        "passes": load.passes,
        "length": load.length,
        "status": "not run" if "reason" in own else "measured",
    }
    if "reason" in own:
        cell["reason"] = own["reason"]
        return cell
    seconds: list[float] = list(chain(*own["visits"]))
    ms = spread([1e3 * each for each in seconds])
    cell |= {"ms": ms.median, "ms_low": ms.low, "ms_high": ms.high, "repeats": len(seconds)}
    cell["us_per_token"] = 1e3 * ms.median / (load.batch * load.length)
    if "visits" in exact:
        by_visit = [ratios(mine, theirs) for mine, theirs in zip(own["visits"], exact["visits"], strict=True)]
        faster = spread(list(chain(*by_visit)))
        cell |= {"speedup": faster.median, "speedup_low": faster.low, "speedup_high": faster.high}
        cell["visits"] = [statistics.median(visit) for visit in by_visit]
    memory = bench.results.get(f"memory/{load.key}/{method}")
    if memory is not None:
        cell["extra_bytes"], cell["memory"] = memory["bytes"], memory["how"]
        if memory["bytes"] is not None:
            cell["bytes_per_token"] = memory["bytes"] / (load.batch * load.length)
    return cell


# ---------------------------------------------------------------------- what a reader must know


def _notes(bench: Bench) -> list[str]:
    s = bench.settings
    notes = [
        f"{EXACT} is torch's scaled_dot_product_attention, called itself. All methods take their turn with it, round "
        "by round, on standard normal inputs; times are medians over rounds, rounds of warm-up excluded.",
        "A speed-up is the median over rounds of SDPA's time divided by the method's in the same round.",
    ]
    if s.quick:
        notes.append("A quick run: few rounds, memory not measured.")
    else:
        notes.append(
            "Extra memory is the peak of one call in a process of its own above what the inputs take. The output "
            "counts, and the gradients do. Differences below about 1 MiB are not told apart."
        )
    if bench.resumed:
        notes.append(f"{bench.resumed} of {len(bench.results)} units come from an earlier, interrupted run.")
    return notes


def _command(s: Settings) -> str:
    standard: Any = Settings()
    words = ["subquad", "bench"] + (["--methods", " ".join(s.methods)] if s.methods != standard.methods else [])
    for option, setting in OPTIONS.items():
        value = getattr(s, setting)
        if value != getattr(standard, setting):
            words += [option, ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"]
    return shlex.join([*words, *["--causal"] * s.causal, *["--quick"] * s.quick])
