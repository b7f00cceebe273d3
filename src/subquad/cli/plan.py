"""`subquad plan`."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.common import measured, needs, say, say_what_was_saved, show, user_errors
from subquad.cli.options import AsJson, Save, with_options
from subquad.workflows.settings import PlanSettings


@with_options(PlanSettings)
def plan(
    settings: PlanSettings,
    out: Annotated[Path, typer.Option(help="Folder for the plan; interrupted runs resume from it.")] = Path(
        "subquad-plan"
    ),
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Find which method runs in which layer at which length, for an error that you accept."""
    with user_errors(), needs("demo"):
        from subquad.report.plan_schema import PlanReport
        from subquad.report.plan_tables import rich_table
        from subquad.report.plan_write import write_plan_report
        from subquad.workflows import saving
        from subquad.workflows.planning.report import report_of
        from subquad.workflows.planning.run import Made, make

        def write(made: Made, folder: Path) -> list[Path]:
            made.plan.save(folder, made.planning.loads[0].model)
            saving.save(saving.chosen_by_plan(made), settings.model, save)
            return write_plan_report(report_of(made), folder)

        saving.check(save, out, settings.model)
        made, paths = measured(out, lambda progress: make(settings, out, progress), write)
        report: PlanReport = report_of(made)
    if not show(report, rich_table, as_json):
        say(f"Plan: {out / 'plan.json'}")
        say(f"Report: {next(path for path in paths if path.suffix == '.html')}")
    say_what_was_saved(saving.chosen_by_plan(made), save, as_json)
