"""Write the files of a comparison, of a benchmark and of an inspection.

All files of a report are made before the first one is written, into a folder that is made if need be. The JSON file
says that the report is whole, so it comes last.
"""

import csv
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from subquad.report import bench_plots, bench_tables, content, inspect_plots, inspect_tables, ranks_sheet
from subquad.report.bench_schema import BenchCell, BenchReport
from subquad.report.files import as_json, write_files
from subquad.report.inspect_schema import InspectReport
from subquad.report.page import html
from subquad.report.plots import drawings, plots
from subquad.report.schema import Report
from subquad.report.tables import markdown


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json, report.md, report.html and the plots; return their paths."""
    drawn = plots(report)
    contents = {
        "report.md": markdown(report, list(drawn)).encode(),
        **drawn,
        "report.html": html(report, drawings(report)).encode(),
        "report.json": as_json(report),
    }
    return write_files(contents, folder, stale=content.FIGURES)


def write_bench(report: BenchReport, folder: Path) -> list[Path]:
    """Write bench.json, bench.csv, bench.md and the plots; return their paths."""
    drawn = bench_plots.plots(report)
    contents = {
        "bench.csv": csv_of(report).encode(),
        "bench.md": bench_tables.markdown(report, list(drawn)).encode(),
        **drawn,
        "bench.json": as_json(report),
    }
    return write_files(contents, folder, stale=bench_plots.PLOTS)


def write_ranks(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ranks.json and ranks.md; return their paths."""
    return write_files({"ranks.md": ranks_sheet.markdown(report).encode(), "ranks.json": as_json(report)}, folder)


def csv_of(report: BenchReport) -> str:
    """One row per cell, a column for each of its figures; empty where it was not measured."""
    text = StringIO(newline="")
    rows = csv.DictWriter(text, list(BenchCell.__annotations__), lineterminator="\n")
    rows.writeheader()
    rows.writerows(report["cells"])
    return text.getvalue()


def write_inspection(report: InspectReport, folder: Path) -> list[Path]:
    """Write results.json, results.md and the plots; return their paths."""
    drawn = inspect_plots.plots(report)
    page = inspect_tables.markdown(report, list(drawn)).encode()
    fits = (path.name for path in folder.glob(inspect_plots.FIT.replace(".", "*.")))
    contents = {"results.md": page, **drawn, "results.json": as_json(report)}
    return write_files(contents, folder, stale={*inspect_plots.PLOTS, *fits})
