"""Write a comparison's report."""

from pathlib import Path

from subquad.report import content
from subquad.report.files import as_json, write_files
from subquad.report.page import html
from subquad.report.plots import plots
from subquad.report.schema import Report
from subquad.report.tables import markdown


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json, report.md, report.html and the plots into a folder, made if need be; return their paths.

    All of them are made before the first one is written.
    """
    return write_files(_contents(report), folder, stale=content.FIGURES)


def _contents(report: Report) -> dict[str, bytes]:
    drawn = plots(report)
    return {
        "report.json": as_json(report),
        "report.md": markdown(report, list(drawn)).encode(),
        **drawn,
        "report.html": html(report, drawn).encode(),
    }
