"""What the commands share: errors in one line, progress, the folder that is written to."""

import errno
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.text import Text

errors = Console(stderr=True)
LONGEST = 2000  # characters of a message
Progress = Callable[[str, int, int], None]  # what is under way, units done, units in all
Report = TypeVar("Report")


@contextmanager
def user_errors(again: str = "the same command resumes from here") -> Iterator[None]:
    """One line and exit code 2 for what the user can fix; 130 for an interruption, and what to do `again`."""
    from subquad.errors import InputError

    try:
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
    except KeyboardInterrupt:
        say(f"interrupted; {again}", errors)
        raise typer.Exit(130) from None


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, NumPy, torch's CPU allocator or a GPU ran out of memory."""
    marks = ("can't allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(mark in str(error) for mark in marks)


def _end(message: str) -> NoReturn:
    cut = message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
    text = plain(cut)
    errors.print(Text.assemble(("error:", "bold red"), " ", text), soft_wrap=True)
    raise typer.Exit(2) from None


def say(message: str, console: Console | None = None) -> None:
    """Print a line that holds what the user gave: no markup, no emoji codes, no control characters."""
    (console or Console()).print(Text(plain(message)), soft_wrap=True)


def plain(message: str) -> str:
    """One line: characters that do not print are written as Python writes them."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)


def with_plain_words(command: Callable[..., None]) -> Callable[..., None]:
    """A command that refuses arguments that can be neither a file's name nor part of a report."""

    @wraps(command)
    def run(**given: Any) -> None:
        from subquad.errors import InputError

        with user_errors():
            for option, value in given.items():
                for word in map(str, value if isinstance(value, list) else [value]):
                    if "\0" in word or word.encode(errors="replace").decode() != word:
                        raise InputError(f"{option} {word!r} is not text in UTF-8 without NUL characters")
        command(**given)

    return run


def with_lines_for_warnings(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose warnings are lines on standard error, without the place in the code that they come from."""

    @wraps(command)
    def run(**given: Any) -> None:
        def shown(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
            if issubclass(category, UserWarning):
                say(f"warning: {' '.join(str(message).split())}", errors)
            else:
                as_python_does(message, category, *place, **options)

        with warnings.catch_warnings():
            as_python_does, warnings.showwarning = warnings.showwarning, shown
            command(**given)

    return run


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """A package that is not installed, in one line with the extra that brings it."""
    from subquad.errors import InputError

    try:
        yield
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: pip install 'subquad[{extra}]'") from None


@contextmanager
def working_in(out: Path) -> Iterator[None]:
    """The folder of the results, in which no other run works meanwhile; InputError where it is none."""
    from subquad.data.files import exists
    from subquad.errors import InputError
    from subquad.workflows.alone import alone_in

    if exists(out) and not out.is_dir():
        raise InputError(f"--out {out} is a file; give a folder")
    with alone_in(out):
        yield


def measured(
    out: Path, measure: Callable[[Progress], Report], write: Callable[[Report, Path], list[Path]]
) -> tuple[Report, list[Path]]:
    """Measure, write the report's files into the folder, and forget the units that were kept there meanwhile."""
    from subquad.workflows.store import Store

    with working_in(out):
        with progress_bar() as progress:
            report = measure(progress)
        paths = write(report, out)
        Store.clear(out)
    return report, paths


def show(report: Report, as_table: Callable[[Report], Any], as_json: bool) -> bool:
    """Print a report as a table, or as JSON and nothing else; returns whether it was JSON."""
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        Console().print(as_table(report))
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


def results_console() -> Console:
    """Where results go: in a file, lines are as long as tables need."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Report the progress of a long run on standard error: a bar on a terminal, lines elsewhere."""
    from rich import progress as rich

    what = rich.TextColumn("{task.description:<42}", markup=False)
    columns = (what, rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn())
    with rich.Progress(*columns, console=errors, transient=True) as bar:
        shown = bar.add_task("loading")

        def progress(what: str, done: int, total: int) -> None:
            bar.update(shown, description=what, completed=done, total=total)
            if not errors.is_terminal and total > 1 and (done % 10 == 0 or done == total):
                print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

        yield progress
