"""`subquad needle`."""

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
from subquad.tools.needle.settings import NeedleSettings

NEEDLE = Kind(
    "subquad needle",
    "report.json",
    "report.md",
    names_itself("subquad needle"),
    table_in("subquad.tools.needle.tables"),
    record_in("subquad.tools.needle.schema", "NeedleReport"),
)


@with_options(NeedleSettings)
def needle(
    settings: NeedleSettings,
    out: Annotated[Path, typer.Option(help="Folder for the results; interrupted runs resume from it.")] = Path(
        "subquad-needle"
    ),
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Measure whether a decoder retrieves facts from long prompts, with exact attention and with methods."""
    with user_errors(), needs("demo"):
        from subquad.tools.cli.finished import Claim, results_in
        from subquad.tools.needle.report import report_of
        from subquad.tools.needle.run import check, measure
        from subquad.tools.needle.write import write_needle

        with results_in(Claim(NEEDLE, settings, out), partial(check, settings), again) as results:
            report: Any = results.finished
            if report is None:
                with progress_bar() as progress:
                    report = report_of(measure(settings, out, progress), settings)
            outcome = results.written(report, write_needle)
        if not show(outcome, lambda: NEEDLE.table(outcome), as_json):
            say(f"Report: {out / NEEDLE.page}, with needle.png next to it")


COMMAND = Command(needle, position=6, kinds=(NEEDLE,), settings=NeedleSettings)
