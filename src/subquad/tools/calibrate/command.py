"""`subquad calibrate`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.core.errors import InputError
from subquad.tools.calibrate.settings import CalibrateSettings
from subquad.tools.cli.command_options import Again, AsJson, with_options
from subquad.tools.cli.commands import Command
from subquad.tools.cli.common import needs, user_errors
from subquad.tools.cli.kinds import Kind, Record, table_in
from subquad.tools.cli.output import say, show
from subquad.tools.cli.progress import progress_bar


def _is_fitted(content: Record) -> bool:
    record = content.get("record")
    return isinstance(record, dict) and "history" in record


CALIBRATE = Kind(
    "subquad calibrate",
    "adapter.json",
    "README.md",
    _is_fitted,
    table_in("subquad.tools.calibrate.adapter_card", "rich_record"),
    plain=lambda content: content["record"],
)


@with_options(CalibrateSettings)
def calibrate(
    settings: CalibrateSettings,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the adapter; interrupted runs resume from it.")
    ] = Path("subquad-adapter"),
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Fit a method's learned parameters to a frozen model, from plain text."""
    with user_errors(), needs("demo"):
        from subquad.tools.calibrate.run import calibrate as run
        from subquad.tools.calibrate.run import check, save
        from subquad.tools.cli.finished import Claim, results_in

        with results_in(Claim(CALIBRATE, settings, out), partial(check, settings), again) as results:
            record: Any = results.finished
            if record is None:
                _check_card(out)
                with progress_bar() as progress:
                    fitted = run(settings, out, progress)
                record = results.written(
                    fitted.record, lambda record, folder: [save(replace(fitted, record=record), folder)]
                )
        if not show(record, lambda: CALIBRATE.table(record), as_json):
            say(f"Adapter: {out}")


def _check_card(out: Path) -> None:
    """InputError where the adapter's card would replace another file: it is no earlier card, nor of a run cut off."""
    from subquad.tools.runs.cache import begun_in

    if (out / CALIBRATE.page).exists() and not ((out / CALIBRATE.file).exists() or begun_in(out)):
        raise InputError(f"{out} has a {CALIBRATE.page}, which the adapter's card would replace; give another folder")


COMMAND = Command(calibrate, position=3, kinds=(CALIBRATE,), settings=CalibrateSettings)
