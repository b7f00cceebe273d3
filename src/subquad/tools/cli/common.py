"""Shared code of the commands: errors in one line, and the options of all commands."""

import errno
import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text

from subquad.tools.cli import torchrun
from subquad.tools.cli.output import errors, manner, plain, say, speaking, tell
from subquad.tools.cli.stopped import exit_message, stops_first
from subquad.tools.runs import processes

LONGEST = 2000  # characters of a message
OUTPUT = "Output"  # the options of all commands, as --help groups them
IMPORT = typer.Option(
    "--import", help="A module that registers methods of your own, from this folder or installed; repeatable."
)
Command = Callable[..., None]


# ---------------------------------------------------------------------- how a command ends


@contextmanager
def user_errors(again: str = "the same command resumes from here") -> Iterator[None]:
    """One line and exit code 2 for what the user can fix; where it is stopped, what to do `again`."""
    from subquad.core.errors import InputError, is_out_of_memory

    try:
        with stops_first():
            yield
    except InputError as error:
        _end(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _end(f"out of memory ({str(error).partition(chr(10))[0]}); give shorter inputs, smaller batches or sizes")
    except OSError as error:  # of the machine, not of the program: a full disk, a name that is too long
        if error.errno == errno.EPIPE:
            raise
        _end(": ".join(str(part) for part in (error.filename, error.strerror or error) if part))
    except KeyboardInterrupt as stop:
        message, code = exit_message()
        say_error_after(stop)
        say(f"{message}; {again}", errors)
        raise typer.Exit(code) from None


def say_error_after(stop: BaseException) -> None:
    """Say the error of a command that was stopped and then failed while it ended; with --verbose its traceback."""
    if isinstance(stop.__cause__, Exception):
        if manner().verbose:
            errors.print(Text("".join(traceback.format_exception(stop.__cause__)).rstrip()), soft_wrap=True)
        say(f"while the command ended: {stop}", errors)


def _end(message: str) -> NoReturn:
    """The error that is under way in one line, with --verbose below its traceback; exit code 2."""
    if manner().verbose:
        errors.print(Text(traceback.format_exc().rstrip()), soft_wrap=True)
    cut = message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
    errors.print(Text.assemble(("error:", "bold red"), " ", plain(cut)), soft_wrap=True)
    raise typer.Exit(2) from None


# ---------------------------------------------------------------------- what every command has


def as_command(command: Command) -> Command:
    """A function as a command: with the options of all commands, and with errors and warnings in one line each."""
    return _with_output_options(_with_plain_words(with_lines_for_warnings(command)))


def _with_output_options(command: Command) -> Command:
    """A command with options for its output on standard error, its log file, and modules to import."""
    panel: dict[str, Any] = {"rich_help_panel": OUTPUT}
    more: dict[str, tuple[Any, Any, Any]] = {
        "quiet": (bool, False, typer.Option("--quiet", "-q", help="Print results and errors only.", **panel)),
        "verbose": (
            bool,
            False,
            typer.Option("--verbose", help="Print how long each unit took, and tracebacks of errors.", **panel),
        ),
        "log_file": (
            Path | None,
            None,
            typer.Option(help="Also append what goes to standard error to this file, with times.", **panel),
        ),
        "import_": (list[str] | None, None, IMPORT),
    }
    in_signature = inspect.signature(command).parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])
        for name, (kind, default, info) in more.items()
    ]

    @wraps(command)
    def run(
        quiet: bool, verbose: bool, log_file: Path | None, import_: list[str] | None = None, **arguments: Any
    ) -> None:
        from subquad.tools.runs.imports import importing

        others = processes.number() > 0  # processes of a run whose first one speaks
        shown_as = (True, False, None) if others else (quiet, verbose, log_file)
        with user_errors(), speaking(*shown_as), importing(import_ or ()):
            torchrun.check(command.__name__)
            command(**arguments)

    run.__signature__ = inspect.Signature([*in_signature, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*in_signature, *added)}
    return run


def _with_plain_words(command: Command) -> Command:
    """A command that refuses arguments that can be neither a file's name nor part of a report."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        from subquad.core.errors import InputError

        with user_errors():
            for option, value in arguments.items():
                for word in map(str, value if isinstance(value, list) else [value]):
                    if "\0" in word or word.encode(errors="replace").decode() != word:
                        raise InputError(f"{option} {word!r} is not text in UTF-8 without NUL characters")
        command(**arguments)

    return run


def with_lines_for_warnings(command: Command) -> Command:
    """A command whose warnings are lines on standard error, without the place in the code that they come from."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        def shown(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
            if issubclass(category, UserWarning):
                tell(f"warning: {' '.join(str(message).split())}")
            else:
                as_python_does(message, category, *where, **options)

        with warnings.catch_warnings():
            as_python_does, warnings.showwarning = warnings.showwarning, shown
            command(**arguments)

    return run


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """A package that is not installed, or of a version that does not fit, in one line with the remedy."""
    from subquad.core.errors import InputError, not_installed

    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(not_installed(str(error.name).partition(".")[0], extra)) from None
    except ImportError as error:
        raise InputError(" ".join(str(error).split())) from None
