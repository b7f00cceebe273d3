"""Write an inspection's files."""

from pathlib import Path

from subquad.report.files import as_json, write_files
from subquad.report.inspect_plots import FIT, PLOTS, plots
from subquad.report.inspect_schema import InspectReport
from subquad.report.inspect_tables import markdown


def write_inspection(report: InspectReport, folder: Path) -> list[Path]:
    """Write results.json, results.md and the plots into a folder, made if need be; return their paths.

    All of them are made before the first one is written.
    """
    drawn = plots(report)
    earlier = {*PLOTS, *(path.name for path in folder.glob(FIT.replace(".", "*.")))}
    contents = {"results.json": as_json(report), "results.md": markdown(report, list(drawn)).encode(), **drawn}
    return write_files(contents, folder, stale=earlier)
