"""`subquad inspect`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.tools.cli.command_options import Again, AsJson, with_options
from subquad.tools.cli.commands import Command
from subquad.tools.cli.common import needs, user_errors
from subquad.tools.cli.kinds import Kind, names_itself, record_in, table_in
from subquad.tools.cli.output import say, show
from subquad.tools.cli.progress import progress_bar
from subquad.tools.inspect.settings import InspectSettings

INSPECT = Kind(
    "subquad inspect",
    "results.json",
    "results.md",
    names_itself("subquad inspect"),
    table_in("subquad.tools.inspect.tables"),
    record_in("subquad.tools.inspect.schema", "InspectReport"),
)


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
        from subquad.tools.cli.finished import Claim, results_in
        from subquad.tools.inspect.report import report_of
        from subquad.tools.inspect.run import check, measure
        from subquad.tools.inspect.write import write_inspection

        with results_in(Claim(INSPECT, settings, out), partial(check, settings), again) as results:
            report: Any = results.finished
            if report is None:
                with progress_bar() as progress:
                    report = report_of(measure(settings, out, progress), settings)
            outcome = results.written(report, write_inspection)
        if not show(outcome, lambda: INSPECT.table(outcome), as_json):
            say(f"Results: {out / INSPECT.file}, {out / INSPECT.page}, and the plots next to them")


COMMAND = Command(inspect, position=5, kinds=(INSPECT,), settings=InspectSettings)
