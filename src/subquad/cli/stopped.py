"""How a command ends that is told to stop: with Ctrl-C, or with SIGTERM, which schedulers and `kill` send."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command in the same way as Ctrl-C."""


def said(error: KeyboardInterrupt) -> tuple[str, int]:
    """What happened, in a word, and the exit code: 128 and the number of the signal, as shells count."""
    return ("terminated", 128 + signal.SIGTERM) if isinstance(error, Terminated) else ("interrupted", 130)


@contextmanager
def terminable() -> Iterator[None]:
    """In the block, the first SIGTERM raises `Terminated`, so that workers end and a line says how to resume.

    Not under torchrun: it sends SIGTERM to all processes where one fails, and training says which one that was.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        yield
        return

    def stop(*_: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
