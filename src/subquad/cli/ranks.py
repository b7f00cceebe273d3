"""The processes of a command that torchrun started: the first of them prints and writes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from subquad.cli.progress import progress_bar

ALONE = ("compare", "plan", "calibrate", "inspect")  # commands that run in one process


def count() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def number() -> int:
    """The number of this process."""
    return int(os.environ.get("RANK", "0"))


def check(command: str) -> None:
    """End a command that runs in one process where there are several; the first says so."""
    from subquad.errors import InputError

    if command in ALONE and count() > 1:
        with one_says():
            raise InputError(
                f"subquad {command} runs in one process, but torchrun started {count()}: start it without torchrun; "
                "subquad bench and subquad train split the tokens of an input over processes"
            )


@contextmanager
def one_says() -> Iterator[None]:
    """Errors that all processes have alike are said by the first; the others end with the same exit code."""
    from subquad.errors import InputError

    try:
        yield
    except InputError:
        if number():
            raise typer.Exit(2) from None
        raise


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar, in the first process."""
    if number():
        yield lambda what, done, total: None
        return
    with progress_bar() as shown:
        yield shown
