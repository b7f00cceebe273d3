"""The command line: parse, call, print. Mistakes of the user end in one line and exit code 2.

Each command is registered by its own folder (`commands`).
"""

import io
import sys
from typing import Annotated

import typer

from subquad import __version__
from subquad.tools.cli import about, report
from subquad.tools.cli.commands import commands
from subquad.tools.cli.common import as_command
from subquad.tools.cli.completion import whole_words
from subquad.tools.cli.stopped import exit_codes, terminable
from subquad.tools.cli.words import StrictCommand

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool | None) -> None:
    if asked:
        print(f"subquad {__version__}")
        raise typer.Exit


@app.callback()
def subquad(
    version: Annotated[
        bool | None, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = None,
) -> None:
    """Transformer attention in sub-quadratic time, with measurements of what it costs in quality.

    Exit codes: 0 done, 1 internal error, 2 invalid input, 130 interrupted, 143 terminated. These, environment
    variables and the options of all commands are in docs/reference/command-line.md.
    """


for command in commands():
    app.command(cls=StrictCommand)(as_command(command.run))
for run in (report.report, about.methods):
    app.command(cls=StrictCommand)(as_command(run))


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):  # in an encoding without × or ≈, these are printed as question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    with exit_codes(), whole_words(), terminable(), exit_codes():
        app(prog_name="subquad")
