"""Write the files of a run.

All files are made before the first one is written, into a folder that is made if need be. The JSON file marks the
report as complete, so it comes last.
"""

from pathlib import Path

from subquad.tools.needle.plots import PLOTS, plots
from subquad.tools.needle.schema import NeedleReport
from subquad.tools.needle.tables import markdown
from subquad.tools.report.report_files import as_json, write_files


def write_needle(report: NeedleReport, folder: Path) -> list[Path]:
    """Write report.json, report.md and the plot; return their paths."""
    drawn = plots(report)
    contents = {"report.md": markdown(report, list(drawn)).encode(), **drawn, "report.json": as_json(report)}
    return write_files(contents, folder, stale=PLOTS)
