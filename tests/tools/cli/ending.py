"""Commands that get a signal at one point and fail at another, each in a fork of this process.

The input is JSON: a list of [signal, points where it is sent with "+" between them, point that fails]. Points are
"parsing", "working", "cleaning up", "saying so" and "leaving" (after the command). The output is a line for each, with
the exit code and standard error.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from subquad.tools.cli import about, common, main, words

number, sent, fails = signal.SIGINT, [""], ""


def reach(point: str) -> None:
    """Send the signal here, or fail here, where that was asked for."""
    if point in sent:
        os.kill(os.getpid(), number)
    if point == fails:
        raise RuntimeError("no more")


def before(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, where the point is reached first."""

    def run(*arguments: Any, **options: Any) -> Any:
        reach(point)
        return function(*arguments, **options)

    return run


def parsed(*_: Any) -> Any:
    """The result of the command, in place of reading the text of a method."""
    try:
        reach("working")
    finally:
        reach("cleaning up")
    return sys.exit(0)


@contextmanager
def leaving() -> Iterator[None]:
    """The block around all commands."""
    try:
        yield
    finally:
        reach("leaving")


def ended() -> None:
    """Run the command, and end this process as Python would."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background of a shell ignores it
    code = 0
    try:
        main.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException as error:
        traceback.print_exc()
        code = 1 if isinstance(error, Exception) else -number
    sys.stderr.flush()
    os._exit(code % 256)


if __name__ == "__main__":  # what collects tests imports it too
    about.parse_method = parsed
    common.say = before("saying so", common.say)
    words.StrictCommand.parse_args = before("parsing", words.StrictCommand.parse_args)  # type: ignore[method-assign]
    main.whole_words = leaving
    sys.argv = ["subquad", "methods", "full"]
    for each in json.load(sys.stdin):
        number, sent, fails = signal.Signals(each[0]), each[1].split("+"), each[2]
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if child == 0:
                os.dup2(said.fileno(), 2)
                ended()
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            print(json.dumps([code, said.read()]), flush=True)
