"""`subquad inspect`."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.common import measured, needs, say, show, user_errors
from subquad.cli.options import AsJson, with_options
from subquad.workflows.settings import InspectSettings


@with_options(InspectSettings)
def inspect(
    settings: InspectSettings,
    out: Annotated[Path, typer.Option(help="Folder for the results; interrupted runs resume from it.")] = Path(
        "subquad-inspect"
    ),
    as_json: AsJson = False,
) -> None:
    """Show which keys methods choose in a model, and how much of exact attention's weight is on them."""
    with user_errors(), needs("demo"):
        from subquad.report.inspect_tables import rich_table
        from subquad.report.write import write_inspection
        from subquad.workflows.inspect import measure
        from subquad.workflows.inspect_report import report_of

        report, paths = measured(
            out, lambda progress: report_of(measure(settings, out, progress), settings), write_inspection
        )
    if not show(report, rich_table, as_json):
        say(f"Results: {', '.join(map(str, paths))}")
