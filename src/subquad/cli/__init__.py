"""The command line: parse, call, print. Mistakes of the user end in one line and exit code 2. One file a command."""

import typer

from subquad.cli import about, bench, calibrate, compare, inspect, plan, reproduce, train
from subquad.cli.common import with_plain_words

app = typer.Typer(
    help="Transformer attention for less than N², with an honest account of what it costs in quality.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    compare.compare,
    plan.plan,
    calibrate.calibrate,
    bench.bench,
    inspect.inspect,
    train.train,
    reproduce.reproduce,
    about.methods,
    about.doctor,
):
    app.command()(with_plain_words(command))


def main() -> None:
    """Run the command line."""
    app()
