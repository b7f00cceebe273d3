"""Write the files of a benchmark.

All files are made before the first one is written, into a folder that is made if need be. The JSON file marks the
report as complete, so it comes last.
"""

import csv
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from subquad.tools.bench import plots as bench_plots
from subquad.tools.bench import ranks_page, steps_page, tables
from subquad.tools.bench.schema import BenchReport
from subquad.tools.report.report_files import as_json, write_files
from subquad.tools.runs.records import to_plain

COLUMNS = (  # of bench.csv
    *("method", "dtype", "passes", "length", "status", "reason", "ms", "ms_low", "ms_high", "repeats", "us_per_token"),
    *("growth", "speedup", "speedup_low", "speedup_high", "visits", "verdict", "noise", "extra_bytes"),
    *("bytes_per_token", "memory"),
)


def write_bench(report: BenchReport, folder: Path) -> list[Path]:
    """Write bench.json, bench.csv, bench.md and the plots; return their paths."""
    drawn = bench_plots.plots(report)
    contents = {
        "bench.csv": csv_of(report).encode(),
        "bench.md": tables.markdown(report, list(drawn)).encode(),
        **drawn,
        "bench.json": as_json(report),
    }
    return write_files(contents, folder, stale=bench_plots.PLOTS)


def write_ranks(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ranks.json and ranks.md; return their paths."""
    return write_files({"ranks.md": ranks_page.markdown(report).encode(), "ranks.json": as_json(report)}, folder)


def write_steps(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write steps.json and steps.md; return their paths."""
    return write_files({"steps.md": steps_page.markdown(report).encode(), "steps.json": as_json(report)}, folder)


def csv_of(report: BenchReport) -> str:
    """One row per cell, a column for each of its figures; empty where it was not measured."""
    text = StringIO(newline="")
    rows = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    rows.writeheader()
    rows.writerows(map(to_plain, report.cells))
    return text.getvalue()
