"""`subquad plan`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.tools.cli import torchrun
from subquad.tools.cli.command_options import Again, AsJson, Save, with_options
from subquad.tools.cli.commands import Command, command_line
from subquad.tools.cli.common import needs, user_errors
from subquad.tools.cli.kinds import Kind, names_itself, record_in, table_in
from subquad.tools.cli.output import say, say_what_was_saved, show, tell
from subquad.tools.cli.worker_options import with_workers
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.runs.executors import Executor

PLAN = Kind(
    "subquad plan",
    "report.json",
    "report.html",
    names_itself("plan"),
    table_in("subquad.tools.plan.tables"),
    record_in("subquad.tools.plan.schema", "PlanReport"),
    beside=("plan.json",),
)

NO_MODEL = (
    "Planning for demo-encoder: no model was given, and its passes take a fraction of the time of those of "
    "demo-decoder, which subquad compare runs by default."
)


@with_workers
@with_options(PlanSettings)
def plan(
    settings: PlanSettings,
    out: Annotated[Path, typer.Option(help="Folder for the plan; interrupted runs resume from it.")] = Path(
        "subquad-plan"
    ),
    save: Save = None,
    again: Again = False,
    as_json: AsJson = False,
    *,
    executor: Executor,
) -> None:
    """Choose a method for each layer and length, within an error that you accept.

    Under torchrun, the tokens of every input are split over the ranks.
    """
    with user_errors(), torchrun.group(settings.device) as group, needs("demo"):
        from subquad.tools.cli.finished import Claim, results_in
        from subquad.tools.models import saving
        from subquad.tools.plan.report import next_command, report_of
        from subquad.tools.plan.run import check, chosen_by_plan, make
        from subquad.tools.plan.write import write_plan_report

        if group.is_main and (warned := saving.check(save, out, settings)):
            tell(warned)
        claim = Claim(PLAN, settings, out, group.count)
        with results_in(claim, partial(check, settings), again, group) as results:
            report: Any = results.finished
            if report is None:
                if settings.model is None and group.is_main:
                    tell(NO_MODEL)
                with torchrun.progress() as progress, executor:
                    made = make(settings, out, progress, executor, group)
                if group.is_main:
                    made.plan.save(out, made.planning.loads[0].model)
                report = report_of(made, next_command(made, settings, out, partial(command_line, "compare")))
            result = results.written(report, write_plan_report)
        if not group.is_main:
            return
        chosen = chosen_by_plan(settings, out) if save else None
        saved = None if save is None else saving.save(chosen, settings, save)
        if not show(result, lambda: PLAN.table(result), as_json):
            say(f"Plan: {out / 'plan.json'}")
            say(f"Report: {out / PLAN.page}")
        say_what_was_saved(saved, save, as_json)


COMMAND = Command(plan, position=2, kinds=(PLAN,), settings=PlanSettings)
