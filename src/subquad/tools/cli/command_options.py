"""Options that several commands have, and commands whose options are those of their settings."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from subquad.tools.cli import torchrun
from subquad.tools.cli.common import user_errors
from subquad.tools.cli.completion import method_texts
from subquad.tools.runs.common_options import DATA, DEVICE
from subquad.tools.runs.options import Option, from_arguments, options

COMPLETED = {"methods": method_texts, "method": method_texts}  # options whose words a shell can complete
Device = Annotated[str, typer.Option(help=DEVICE)]
Again = Annotated[
    bool, typer.Option("--again", help="Run again if the folder contains a finished run, and replace its results.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")]
Save = Annotated[
    Path | None,
    typer.Option(help="Also save the model with the recommended attention: a new or an empty folder."),
]
DataDir = Annotated[Path | None, typer.Option(**DATA)]


def with_options(
    settings: type, standard: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda entered: {}
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that is called with these settings and has their options in front of its own.

    `standard` is what settings are, by the command line's arguments, for those that it does not set.
    """
    known = sorted(options(settings).values(), key=lambda option: not option.argument)

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        _, *in_signature = inspect.signature(command).parameters.values()

        @wraps(command)
        def run(**entered: Any) -> None:
            asked = {option.name: entered.pop(option.name) for option in known}
            with user_errors(), torchrun.one_reports():
                made: Any = from_arguments(settings, asked, standard(asked))
            command(made, **entered)

        parameters = [*map(_parameter, known), *in_signature]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorated


def _parameter(option: Option) -> inspect.Parameter:
    """Return an option as a parameter that typer reads."""
    kind, default = option.asked
    flag = [f"--{option.name}"] if kind is bool else []  # else there would be its opposite too
    info: Any = (
        typer.Argument(help=option.help)
        if option.argument
        else typer.Option(*flag, help=option.help, envvar=option.envvar, autocompletion=COMPLETED.get(option.name))
    )
    return inspect.Parameter(
        option.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=Annotated[kind, info]
    )
