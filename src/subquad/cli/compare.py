"""`subquad compare`."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.common import measured, needs, say, show, user_errors
from subquad.cli.options import AsJson, with_options
from subquad.workflows.settings import CompareSettings


@with_options(CompareSettings)
def compare(
    settings: CompareSettings,
    out: Annotated[Path, typer.Option(help="Folder for the report; interrupted runs resume from it.")] = Path(
        "subquad-compare"
    ),
    as_json: AsJson = False,
) -> None:
    """Compare attention methods in a model: quality, speed and memory."""
    with user_errors(), needs("demo"):
        from subquad.report.tables import rich_table
        from subquad.report.write import write_report
        from subquad.workflows.compare import measure
        from subquad.workflows.compare_report import report_of

        report, paths = measured(out, lambda progress: report_of(measure(settings, out, progress)), write_report)
    if not show(report, rich_table, as_json):
        say(f"Report: {next(path for path in paths if path.suffix == '.html')}")
