"""What the commands share: errors in one line, progress, the folder that is written to."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

errors = Console(stderr=True)


@contextmanager
def user_errors(again: str = "the same command goes on from here") -> Iterator[None]:
    """One line and exit code 2 for what the user can mend; 130 for an interruption, and what to do `again`."""
    from subquad.errors import InputError

    try:
        yield
    except InputError as error:
        errors.print(f"[bold red]error:[/] {escaped(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        errors.print(f"interrupted; {again}")
        raise typer.Exit(130) from None


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
    from subquad.errors import InputError
    from subquad.workflows.alone import alone_in

    if out.exists() and not out.is_dir():
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

    columns = (TextColumn("{task.description:<42}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        shown = bar.add_task("loading")

        def progress(what: str, done: int, total: int) -> None:
            bar.update(shown, description=what, completed=done, total=total)
            if not errors.is_terminal and total > 1 and (done % 10 == 0 or done == total):
                print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

        yield progress


def escaped(text: str) -> str:
    """Plain text that rich must not read as markup."""
    return text.replace("[", r"\[")
