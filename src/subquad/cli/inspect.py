"""`subquad inspect`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.cli.common import measured, needs, show, user_errors
from subquad.cli.options import Again, AsJson, with_options
from subquad.cli.output import say
from subquad.workflows.settings import InspectSettings


@with_options(InspectSettings)
def inspect(
    settings: InspectSettings,
    out: Annotated[Path, typer.Option(help="Folder for the results; interrupted runs resume from it.")] = Path(
        "subquad-inspect"
    ),
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Show which keys methods choose in a model, and how much of exact attention's weight is on them."""
    with user_errors(), needs("demo"):
        from subquad.report.kinds import INSPECT
        from subquad.report.write import write_inspection
        from subquad.workflows.finished import Claim
        from subquad.workflows.inspect import check, measure
        from subquad.workflows.inspect_report import report_of

        def report(progress: Any) -> Any:
            return report_of(measure(settings, out, progress), settings)

        found = measured(Claim(INSPECT, settings, out), partial(check, settings), report, write_inspection, again)
        if not show(found, lambda: INSPECT.table(found), as_json):
            say(f"Results: {out / INSPECT.file}, {out / INSPECT.page}, and the plots beside them")
