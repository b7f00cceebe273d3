"""`subquad compare`."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.cli.common import Progress, measured, needs, say, say_what_was_saved, show, user_errors
from subquad.cli.options import AsJson, Save, with_options
from subquad.workflows.settings import CompareSettings


@with_options(CompareSettings)
def compare(
    settings: CompareSettings,
    out: Annotated[Path, typer.Option(help="Folder for the report; interrupted runs resume from it.")] = Path(
        "subquad-compare"
    ),
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Compare attention methods in a model: quality, speed and memory."""
    with user_errors(), needs("demo"):
        from subquad.report.schema import Report
        from subquad.report.tables import rich_table
        from subquad.report.write import write_report
        from subquad.workflows import saving
        from subquad.workflows.compare import measure
        from subquad.workflows.compare_report import report_of

        def made(progress: Progress) -> tuple[Report, saving.Chosen | None]:
            comparison = measure(settings, out, progress)
            report = report_of(comparison)
            return report, saving.chosen_by_comparison(comparison, report) if save else None

        def write(made: tuple[Report, saving.Chosen | None], folder: Path) -> list[Path]:
            paths = write_report(made[0], folder)
            saving.save(made[1], settings.model, save)
            return paths

        saving.check(save, out, settings.model)
        (report, chosen), paths = measured(out, made, write)
    if not show(report, rich_table, as_json):
        say(f"Report: {next(path for path in paths if path.suffix == '.html')}")
    say_what_was_saved(chosen, save, as_json)
