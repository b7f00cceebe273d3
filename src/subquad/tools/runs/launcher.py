"""The signal by which a launcher (`torchrun`) stops a process after another one has ended."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from subquad.tools.runs import processes


class Stopped(BaseException):
    """The launcher stops this process, because another one ended."""


@contextmanager
def stopped_by_launcher() -> Iterator[None]:
    """If there are several processes, SIGTERM raises `Stopped` inside the block, once."""
    if not processes.joined() or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except (RuntimeError, Stopped):  # reporting why is short, and must not be cut off by the launcher, which ends all
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    except BaseException:
        signal.signal(signal.SIGTERM, before)
        raise
    signal.signal(signal.SIGTERM, before)
