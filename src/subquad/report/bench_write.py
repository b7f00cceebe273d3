"""Write a benchmark's files."""

import csv
from io import StringIO
from pathlib import Path

from subquad.report.bench_plots import PLOTS, plots
from subquad.report.bench_schema import BenchCell, BenchReport
from subquad.report.bench_tables import markdown
from subquad.report.files import as_json, write_files


def write_bench(report: BenchReport, folder: Path) -> list[Path]:
    """Write bench.json, bench.csv, bench.md and the plots into a folder, made if need be; return their paths.

    All of them are made before the first one is written.
    """
    drawn = plots(report)
    contents = {
        "bench.json": as_json(report),
        "bench.csv": csv_of(report).encode(),
        "bench.md": markdown(report, list(drawn)).encode(),
        **drawn,
    }
    return write_files(contents, folder, stale=PLOTS)


def csv_of(report: BenchReport) -> str:
    """One row a cell, a column for each of its figures; empty where it was not measured."""
    text = StringIO(newline="")
    rows = csv.DictWriter(text, list(BenchCell.__annotations__), lineterminator="\n")
    rows.writeheader()
    rows.writerows(report["cells"])
    return text.getvalue()
