"""`subquad compare`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.core.messages import note
from subquad.tools.cli import torchrun
from subquad.tools.cli.command_options import Again, AsJson, Save, with_options
from subquad.tools.cli.commands import Command, command_line
from subquad.tools.cli.common import needs, user_errors
from subquad.tools.cli.kinds import Kind, has, record_in, table_in
from subquad.tools.cli.output import say, say_what_was_saved, show, tell
from subquad.tools.compare.settings import CompareSettings

COMPARE = Kind(
    "subquad compare",
    "report.json",
    "report.html",
    has("recommendation", "methods"),
    table_in("subquad.tools.compare.printed"),
    record_in("subquad.tools.compare.schema", "Report"),
)


@with_options(CompareSettings)
def compare(
    settings: CompareSettings,
    out: Annotated[Path, typer.Option(help="Folder for the report; interrupted runs resume from it.")] = Path(
        "subquad-compare"
    ),
    save: Save = None,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Compare attention methods in a model: quality, speed and memory.

    Under torchrun, the tokens of every input are split over the ranks.
    """
    with user_errors(), torchrun.group(settings.device) as group, needs("demo"):
        from subquad.tools.cli.finished import Claim, results_in
        from subquad.tools.compare.attachment import chosen_by_comparison
        from subquad.tools.compare.judgement import read_anew, why_not
        from subquad.tools.compare.report import report_of
        from subquad.tools.compare.run import check, measure
        from subquad.tools.compare.write import write_report
        from subquad.tools.models import saving

        if group.is_main and (warned := saving.check(save, out, settings)):
            tell(warned)

        plan = partial(command_line, "plan")
        claim = Claim(COMPARE, settings.as_used, out, group.count)
        with results_in(claim, partial(check, settings), again, group) as results:
            report: Any = results.finished
            if report is None:
                with torchrun.progress() as progress:
                    lengths: list[int] = []

                    def refresh(comparison: Any) -> None:
                        results.refreshed(report_of(comparison, plan), write_report)
                        if lengths != comparison.lengths_done:
                            lengths[:] = comparison.lengths_done
                            note(progress, f"figures at {lengths[-1]:,} tokens: {out / COMPARE.page}")

                    report = report_of(measure(settings, out, progress, group, refresh), plan)
            result: Any = results.written(read_anew(report, settings, plan), write_report)
        if not group.is_main:
            return
        chosen = chosen_by_comparison(settings, result, out) if save else None
        saved = None if save is None else saving.save(chosen, settings, save)
        if not show(result, lambda: COMPARE.table(result), as_json):
            say(f"Report: {out / COMPARE.page}")
        say_what_was_saved(saved, save, as_json, why_not(result))


COMMAND = Command(compare, position=1, kinds=(COMPARE,), settings=CompareSettings)
