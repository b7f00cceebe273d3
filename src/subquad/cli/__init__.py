"""The command line: parse, call, print. Mistakes of the user end in one line and exit code 2. One file a command."""

from typing import Annotated

import typer

from subquad import __version__
from subquad.cli import about, bench, calibrate, compare, inspect, plan, report, reproduce, train, tune
from subquad.cli.common import as_command
from subquad.cli.completion import whole_words
from subquad.cli.stopped import terminable

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

    Exit codes: 0 done, 1 a mistake of subquad, 2 invalid input, 130 interrupted, 143 terminated. These, environment
    variables and the options of all commands are in docs/reference/command-line.md.
    """


for command in (
    compare.compare,
    plan.plan,
    calibrate.calibrate,
    bench.bench,
    inspect.inspect,
    train.train,
    tune.tune,
    reproduce.reproduce,
    report.report,
    about.methods,
    about.doctor,
):
    app.command()(as_command(command))


def main() -> None:
    """Run the command line."""
    with whole_words(), terminable():
        app(prog_name="subquad")
