"""Output of commands: results on standard output, everything else on standard error, and a log of the latter."""

import io
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from subquad.core.spelling import listed

errors = Console(stderr=True)
MOST_COLUMNS = 240  # columns of what goes to a file or a pipe
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Log:
    """A file that gets the lines of standard error, each with its time."""

    def __init__(self, path: Path):
        from subquad.core.errors import InputError

        self.path = path
        try:
            self._file: TextIO | None = path.open("a", encoding="utf-8", errors="replace", buffering=1)
        except OSError as error:
            raise InputError(f"cannot write to the log file {path}: {error.strerror or error}") from None

    def lines(self, text: str) -> None:
        """Add some lines; a disk that is full ends the log, with a warning, and not the run."""
        try:
            for line in filter(str.strip, text.splitlines()):
                if self._file is not None:
                    self._file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line.rstrip()}\n")
        except OSError as error:
            self._file = None
            say(f"warning: the log file {self.path} ends here: {error.strerror or error}", errors)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class Logged(io.TextIOBase):
    """A stream whose complete lines go to a log as well: without colours, and without what a bar drew before them."""

    def __init__(self, stream: Any, log: Log):
        self._stream, self._log, self._begun = stream, log, ""

    def write(self, text: str) -> int:
        """Write to the stream, and each line that is complete to the log."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._log.lines(_CONTROL.sub("", line).rpartition("\r")[2])
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """True if the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's number."""
        return self._stream.fileno()

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


@dataclass(frozen=True)
class Manner:
    """The verbosity of a command on standard error, and its log file."""

    quiet: bool = False
    verbose: bool = False
    log: Log | None = None


_manner = Manner()  # of the command that runs


def manner() -> Manner:
    """The `Manner` of the running command."""
    return _manner


@contextmanager
def speaking(quiet: bool, verbose: bool, log_file: Path | None) -> Iterator[None]:
    """In the block, messages are printed as these options ask.

    Raises:
        InputError: the options contradict each other, or the log file cannot be written to.
    """
    global _manner
    from subquad.core.errors import InputError

    if quiet and verbose:
        raise InputError("--quiet and --verbose contradict each other; give one of them")
    log, before, stream = None if log_file is None else Log(log_file), _manner, sys.stderr
    hidden = logging.root.manager.disable
    _manner = Manner(quiet, verbose, log)
    if quiet:
        logging.disable(logging.WARNING)  # of libraries
    if log is not None:
        sys.stderr = Logged(stream, log)
    try:
        yield
    except (typer.Exit, SystemExit):
        raise
    except BaseException:
        if log is not None:  # Python prints it to the stream once the log is closed
            log.lines(traceback.format_exc())
        raise
    finally:
        _manner, sys.stderr = before, stream
        logging.disable(hidden)
        if log is not None:
            log.close()


def results_console() -> Console:
    """Print results: lines are as long as the terminal or COLUMNS allows, and in a file or a pipe as tables need."""
    console = Console()
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return Console(width=MOST_COLUMNS)


def say(message: str, console: Console | None = None) -> None:
    """Print a line that holds what the user gave: no markup, no emoji codes, no control characters."""
    (console or results_console()).print(Text(plain(message)), soft_wrap=True)


def tell(message: str) -> None:
    """Say something on standard error that is neither a result nor an error; with --quiet to the log alone."""
    if not _manner.quiet:
        say(message, errors)
    elif _manner.log is not None:
        _manner.log.lines(plain(message))


def plain(message: str) -> str:
    """One line: characters that do not print are written as Python writes them."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)


def show(record: Any, table: Callable[[], RenderableType], as_json: bool) -> bool:
    """Print a record as a table, or as JSON and nothing else; returns whether it was JSON."""
    if as_json:
        from subquad.tools.report.report_files import finite
        from subquad.tools.runs.records import to_plain

        print(json.dumps(finite(to_plain(record)), indent=1))
    else:
        results_console().print(table())
    return as_json


def say_what_was_saved(saved: Any, save: Path | None, as_json: bool, why_not: str = "") -> None:
    """Report what `--save` did (`models.saving.SavedModel`); on standard error with JSON.

    `why_not` is why nothing was chosen.
    """
    if save is None:
        return
    console, chosen = errors if as_json else None, saved.chosen
    if chosen is None:
        say(f"Nothing saved to {save}: {saved.why_not or why_not or 'exact attention is recommended'}.", console)
        return
    lengths = listed([f"{n:,}" for n in chosen.lengths])
    say(f"Saved: {save}, with {chosen.name}; recommended at {lengths} tokens", console)
    limit = "" if saved.accepted is None else f"accepts inputs of up to {saved.accepted:,} tokens, and "
    say(f"The model {limit}loads with its attention wherever subquad.hf is imported.", console)
    for line in saved.differing:
        say(f"Differs from the original model: {line}", console)
    for line in saved.closeness:
        say(line, console)
