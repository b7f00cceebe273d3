"""The end of a command that is told to stop: with Ctrl-C, or with SIGTERM, which schedulers and `kill` send."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer


class _Signals:
    """A flag for SIGTERM: Ray replaces our KeyboardInterrupt by its own, so the exception's type does not tell."""

    terminated = False


def exit_message() -> tuple[str, int]:
    """The name of what stopped the command, and the exit code: 128 and the number of the signal, as shells count."""
    return ("terminated", 128 + signal.SIGTERM) if _Signals.terminated else ("interrupted", 128 + signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """In the block, the first SIGTERM acts like Ctrl-C, so that workers end and a line explains how to resume.

    Not under torchrun: it sends SIGTERM to all processes where one fails, and training reports which one.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        yield
        return

    def stop(*_: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _Signals.terminated = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _Signals.terminated = False


@contextmanager
def stops_first() -> Iterator[None]:
    """Turn errors of a command that ends because it was stopped into KeyboardInterrupt, whose text is the error.

    What is cleaned up after Ctrl-C may fail: the exit code is that of the signal all the same.
    """
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        if not _after_a_stop(error):
            raise
        text = " ".join(str(error).split())
        raise KeyboardInterrupt(f"{type(error).__name__}: {text}") from error


@contextmanager
def exit_codes() -> Iterator[None]:
    """In the block, a stop that no command has dealt with ends in its exit code, and not by the signal or by an error.

    A command deals with stops while it runs; this is for those before it, after it, and during its last lines.
    """
    try:
        with stops_first():
            yield
    except SystemExit as error:  # typer knows of no other code
        if error.code == 128 + signal.SIGINT:
            sys.exit(exit_message()[1])
        raise
    except KeyboardInterrupt:
        word, code = exit_message()
        print(word, file=sys.stderr)
        sys.exit(code)


def _after_a_stop(error: BaseException) -> bool:
    """True if this was raised while a KeyboardInterrupt was dealt with."""
    before, visited = error.__context__, {id(error)}
    while before is not None and id(before) not in visited:
        if isinstance(before, KeyboardInterrupt):
            return True
        visited.add(id(before))
        before = before.__context__
    return False
