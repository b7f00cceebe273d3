"""What the commands share: errors in one line, progress, the folder that is written to."""

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

errors = Console(stderr=True)
LONGEST = 2000  # characters of a message


@contextmanager
def user_errors(again: str = "the same command goes on from here") -> Iterator[None]:
    """One line and exit code 2 for what the user can mend; 130 for an interruption, and what to do `again`."""
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
    """Of Python, NumPy, torch's CPU allocator or a GPU."""
    marks = ("can't allocate memory", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or any(mark in str(error) for mark in marks)


def _end(message: str) -> NoReturn:
    cut = message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
    text = plain(cut)
    errors.print(Text.assemble(("error:", "bold red"), " ", text), soft_wrap=True)
    raise typer.Exit(2) from None


def say(message: str, console: Console) -> None:
    """Print a line that holds what the user gave: no markup, no emoji codes, no control characters."""
    console.print(Text(plain(message)), soft_wrap=True)


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


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """A package that is not installed, in one line with the extra that brings it."""
    from subquad.errors import InputError

    try:
        yield
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: pip install 'subquad[{extra}]'") from None


def divided(given: list[str]) -> tuple[str, ...]:
    """A repeatable option whose values may hold several, divided by spaces."""
    return tuple(part for one in given for part in one.split())


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


def results_console() -> Console:
    """Where results go: in a file, lines are as long as tables need."""
    console = Console()
    return console if console.is_terminal else Console(width=240)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """What a long run tells of itself, on the standard error: a bar, or lines where it is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    what = TextColumn("{task.description:<42}", markup=False)
    columns = (what, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        shown = bar.add_task("loading")

        def progress(what: str, done: int, total: int) -> None:
            bar.update(shown, description=what, completed=done, total=total)
            if not errors.is_terminal and total > 1 and (done % 10 == 0 or done == total):
                print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

        yield progress
