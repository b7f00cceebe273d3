"""`subquad report`."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from subquad.tools.cli.command_options import AsJson
from subquad.tools.cli.common import needs, user_errors
from subquad.tools.cli.output import say, show


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of a finished run, or the JSON file of its results.")],
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the run's page in the browser: report.html, or Markdown.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a finished run again: what its command printed."""
    with user_errors(), needs("report"):
        from subquad.core.errors import InputError
        from subquad.tools.cli.commands import kinds
        from subquad.tools.cli.kinds import read_finished

        finished = read_finished(folder, kinds())
        if not show(finished.record, finished.table, as_json):
            say(f"{finished.kind.command}: {finished.page or finished.path}")
        if open_page:
            if finished.page is None:
                raise InputError(f"there is no {finished.kind.page} next to {finished.path}")
            if not webbrowser.open(finished.page.resolve().as_uri()):
                raise InputError(f"no browser could be started; the page is {finished.page}")
