"""How a command ends that is told to stop: with Ctrl-C, or with SIGTERM, which schedulers and `kill` send."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


class _Signals:
    """Which signal stopped the command: Ray replaces our KeyboardInterrupt by its own, so its type cannot say."""

    terminated = False


def said() -> tuple[str, int]:
    """What stopped the command, in a word, and the exit code: 128 and the number of the signal, as shells count."""
    return ("terminated", 128 + signal.SIGTERM) if _Signals.terminated else ("interrupted", 128 + signal.SIGINT)


@contextmanager
def terminable() -> Iterator[None]:
    """In the block, the first SIGTERM acts like Ctrl-C, so that workers end and a line says how to resume.

    Not under torchrun: it sends SIGTERM to all processes where one fails, and training says which one that was.
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
