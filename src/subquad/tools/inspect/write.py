"""Write the files of an inspection.

All files are made before the first one is written, into a folder that is made if need be. The JSON file marks the
report as complete, so it comes last.
"""

from pathlib import Path

from subquad.tools.inspect import plots as inspect_plots
from subquad.tools.inspect import tables
from subquad.tools.inspect.schema import InspectReport
from subquad.tools.report.report_files import as_json, write_files


def write_inspection(report: InspectReport, folder: Path) -> list[Path]:
    """Write results.json, results.md and the plots; return their paths."""
    drawn = inspect_plots.plots(report)
    page = tables.markdown(report, list(drawn)).encode()
    fits = (path.name for path in folder.glob(inspect_plots.FIT.replace(".", "*.")))
    contents = {"results.md": page, **drawn, "results.json": as_json(report)}
    return write_files(contents, folder, stale={*inspect_plots.PLOTS, *fits})
