"""Write the files of a comparison.

All files are made before the first one is written, into a folder that is made if need be. The JSON file marks the
report as complete, so it comes last.
"""

from pathlib import Path

from subquad.tools.compare import tables
from subquad.tools.compare.page import html
from subquad.tools.compare.plots import drawings, plots
from subquad.tools.compare.printed import markdown
from subquad.tools.compare.schema import Report
from subquad.tools.report.report_files import as_json, write_files


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json, report.md, report.html and the plots; return their paths."""
    drawn = plots(report)
    contents = {
        "report.md": markdown(report, list(drawn)).encode(),
        **drawn,
        "report.html": html(report, drawings(report)).encode(),
        "report.json": as_json(report),
    }
    return write_files(contents, folder, stale=tables.PLOTS)
