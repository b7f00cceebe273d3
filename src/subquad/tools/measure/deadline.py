"""The time limit of a run, which every stage asks before each of its steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from subquad.tools.measure.group import ALONE, MeasuringGroup

Step = TypeVar("Step")
GRACE = 0.1  # share of a limit by which a necessary step may exceed it


class Deadline:
    """A time limit that begins now, on the clock of the main process of a group.

    `outside` are seconds of it for what no stage does: starting the command, and writing its report.
    """

    def __init__(self, seconds: float, group: MeasuringGroup = ALONE, outside: float = 0.0):
        self.seconds, self._group = seconds, group
        self._end = time.perf_counter() + seconds - outside

    @property
    def left(self) -> float:
        """Seconds until the limit; negative after it."""
        return self._group.broadcast_from_main(lambda: self._end - time.perf_counter())

    def allows(self, seconds: float, reserve: float = 0.0) -> bool:
        """True if a step that takes this many seconds leaves the reserve."""
        return self.left >= seconds + reserve

    def allows_late(self, seconds: float) -> bool:
        """True if a necessary step, which takes this many seconds, exceeds the limit by no more than the grace."""
        return self.allows(seconds, -GRACE * self.seconds)

    def part(self, share: float) -> Deadline:
        """The limit of a part of the work: a share of the seconds that are left."""
        return Deadline(share * max(self.left, 0.0), self._group)

    def within(self, steps: Iterable[Step], least: int) -> Iterator[Step]:
        """The first `least` steps, and the others as long as time is left when one begins."""
        for number, step in enumerate(steps):
            if number >= least and self.left <= 0:
                return
            yield step

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time inside."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._end += time.perf_counter() - begun
