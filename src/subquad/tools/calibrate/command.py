"""`subquad calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from subquad.core.errors import InputError
from subquad.tools.calibrate.settings import CalibrateSettings
from subquad.tools.cli.command_options import AsJson, with_options
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
    lambda content: content["record"],
)


@with_options(CalibrateSettings)
def calibrate(
    settings: CalibrateSettings,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the adapter; interrupted runs resume from it.")
    ] = Path("subquad-adapter"),
    as_json: AsJson = False,
) -> None:
    """Fit a method's learned parameters to a frozen model, from plain text."""
    with user_errors(), needs("demo"):
        from subquad.tools.calibrate.run import calibrate as run
        from subquad.tools.calibrate.run import save
        from subquad.tools.runs.alone import alone_in

        if not settings.text:
            raise InputError("no text to fit on: give --text FILE or FOLDER")
        with alone_in(out):
            _check_free(out)
            with progress_bar() as progress:
                fitted = run(settings, out, progress)
            save(fitted, out)
        if not show(fitted.record, lambda: CALIBRATE.table(fitted.record), as_json):
            say(f"Adapter: {out}")


def _check_free(out: Path) -> None:
    """InputError where something lies in the folder that the adapter would replace."""
    from subquad.tools.runs.cache import begun_in

    if (out / "adapter.json").exists():
        raise InputError(
            f"{out} contains an adapter already, which `subquad report` shows: use it, remove it, or give another "
            "folder with --out"
        )
    if (out / "README.md").exists() and not begun_in(out):  # else it is the card of a run that was cut off
        raise InputError(f"{out} has a README.md, which the adapter's card would replace; give another folder")


COMMAND = Command(calibrate, position=3, kinds=(CALIBRATE,), settings=CalibrateSettings)
