"""What the commands share: errors in one line, the folder that is written to, and the options of all commands."""

import errno
import inspect
import json
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import RenderableType
from rich.text import Text

from subquad.tools.cli import ranks
from subquad.tools.cli.output import errors, manner, plain, results_console, say, speaking, tell
from subquad.tools.cli.progress import Reported
from subquad.tools.cli.stopped import exit_message, stops_first
from subquad.tools.runs import processes

if TYPE_CHECKING:
    from subquad.tools.cli.finished import Claim
    from subquad.tools.measure.group import MeasuringGroup

LONGEST = 2000  # characters of a message
OUTPUT = "Output"  # the options of all commands, as --help groups them
IMPORT = typer.Option(
    "--import", help="A module that registers methods of your own, from this folder or installed; repeatable."
)
Command = Callable[..., None]
Report = TypeVar("Report", bound=Mapping[str, Any])


# ---------------------------------------------------------------------- how a command ends


@contextmanager
def user_errors(again: str = "the same command resumes from here") -> Iterator[None]:
    """One line and exit code 2 for what the user can fix; where it is stopped, what to do `again`."""
    from subquad.core.errors import InputError

    try:
        with stops_first():
            yield
    except InputError as error:
        _end(str(error))
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
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


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, NumPy, torch's CPU allocator or a GPU ran out of memory."""
    marks = ("can't allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(mark in str(error) for mark in marks)


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
    """A command that can be told how much it says on standard error, where else that goes, and what to import."""
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
            ranks.check(command.__name__)
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
    """A package that is not installed, in one line with the extra that brings it."""
    from subquad.core.errors import InputError

    try:
        yield
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: pip install 'subquad[{extra}]'") from None


# ---------------------------------------------------------------------- results


@contextmanager
def working_in(out: Path) -> Iterator[None]:
    """The folder of the results, in which no other run works meanwhile; InputError where it is none."""
    from subquad.core.errors import InputError
    from subquad.core.reading import exists
    from subquad.tools.runs.alone import alone_in

    if exists(out) and not out.is_dir():
        raise InputError(f"--out {out} is a file; give a folder")
    with alone_in(out):
        yield


def measured(
    claim: "Claim",
    check: Callable[[], None],
    measure: Callable[[Reported], Report],
    write: Callable[[Any, Path], list[Path]],
    again: bool,
    complete: Callable[[Any], Any] = lambda report: report,
    group: "MeasuringGroup | None" = None,
) -> Mapping[str, Any]:
    """The report of a command: measured and written into the folder, or the one that the folder holds of this run.

    Of a group, all processes measure, and the first one writes.

    Units that were kept meanwhile are forgotten once the report is written. `complete` adds to a report what is not
    measured. `check` raises for what is wrong in the settings, before anything is said against the folder.
    """
    from subquad.core.errors import InputError
    from subquad.tools.measure.group import ALONE
    from subquad.tools.runs.cache import clear

    out, group = claim.folder, group or ALONE

    def finished_report() -> dict[str, Any] | None:
        try:
            return claim.finished(again)
        except InputError:
            check()
            raise

    def put(report: Mapping[str, Any]) -> Mapping[str, Any]:
        report = claim.marked(report)
        if group.is_main:
            write(report, out)
        return report

    with working_in(out) if group.is_main else nullcontext():
        finished = group.broadcast_from_main(finished_report)
        if finished is not None:
            tell(f"{out} holds this run, finished on {claim.day(finished)}; --again measures it again")
            for name in claim.changed_since() if group.is_main else ():
                tell(f"warning: {name} has changed since that run")
            report = complete(finished)
            return dict(finished if report is finished else put(report))
        with ranks.progress() as progress:
            report = put(complete(measure(progress)))
        if group.is_main:
            clear(out)
    return report


def show(record: Any, table: Callable[[], RenderableType], as_json: bool) -> bool:
    """Print a record as a table, or as JSON and nothing else; returns whether it was JSON."""
    from subquad.tools.report.files import finite

    if as_json:
        print(json.dumps(finite(record), indent=1))
    else:
        results_console().print(table())
    return as_json


def say_what_was_saved(chosen: Any, save: Path | None, as_json: bool) -> None:
    """Say what `--save` did with what was chosen, a `workflows.saving.Chosen`; on standard error beside JSON."""
    if save is None:
        return
    console = errors if as_json else None
    if chosen is None:
        say(f"Nothing saved to {save}: exact attention is recommended.", console)
        return
    say(f"Saved: {save}, with {chosen.name}, for inputs of at most {chosen.tokens:,} tokens", console)
    say("It loads with its attention wherever subquad.hf is imported.", console)
