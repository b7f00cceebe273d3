"""The progress of a long run on standard error: a bar on a terminal, lines elsewhere, and how long it still takes."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import progress as rich

from subquad.tools.cli.output import errors, manner, plain, tell

FEW = 2.0  # seconds of work from which nothing is estimated
SILENT = 30.0  # seconds after which a line is printed in any case


class Estimate:
    """The time that a run still takes: from the work done in this run, or from its time limit if that is less."""

    def __init__(self) -> None:
        self.costs: Sequence[float] = ()
        self.until: float | None = None
        self.total, self.done, self.first, self.begun = 0, 0, 0, 0.0

    def expect(self, costs: Sequence[float] = (), seconds: float | None = None) -> None:
        """Take note of how much work each unit is, in proportion, and of the time after which the run ends."""
        self.costs, self.total = costs, 0
        self.until = None if seconds is None else time.monotonic() + seconds

    def left(self, done: int, total: int) -> str:
        """About how long the rest takes, in words; nothing where it is not known yet.

        Units that an earlier run had finished come before the first call, and are not counted.
        """
        now = time.monotonic()
        if done >= total:
            return ""
        limit = math.inf if self.until is None else max(self.until - now, 0.0)
        if self.until is not None and not self.costs:
            return f"at most {in_words(limit)} left"
        if total != self.total or done < self.done:  # another part of the run
            self.total, self.first, self.begun = total, done, now
        self.done = done
        made, left_over = self._cost_between(self.first, done), self._cost_between(done, total)
        seconds = (now - self.begun) * left_over / made if made and now - self.begun >= FEW else math.inf
        if limit < seconds:  # most units that do not fit are left out, but not all
            return f"time limit in {in_words(limit)}" if limit else ""
        return f"about {in_words(seconds)} left" if seconds < math.inf else ""

    def _cost_between(self, begin: int, end: int) -> float:
        return sum(self.costs[begin:end], 0.0) if len(self.costs) == self.total else float(end - begin)


def in_words(seconds: float) -> str:
    """A time in words.

    >>> in_words(20.0), in_words(170.0), in_words(9000.0)
    ('1 min', '3 min', '2.5 h')
    """
    return f"{max(-(-seconds // 60), 1):.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Reported:
    """The progress function of a run (`runs.jobs.Progress`); `draw` shows a state on a terminal."""

    def __init__(self, draw: Callable[[str, int, int, str], None]):
        self.draw, self.estimate = draw, Estimate()
        self.under_way, self.said = "", time.monotonic()
        self.since = self.said
        self.counted = (-1, -1)  # units done and in all, in the last call

    def expect(self, costs: Sequence[float] = (), seconds: float | None = None) -> None:
        """Record a run's estimate of its length, and print it if it is a time alone."""
        self.estimate.expect(costs, seconds)
        if seconds is not None and not costs:
            tell(f"this takes at most about {in_words(seconds)}")

    def note(self, line: str) -> None:
        """Say a line that is not about progress."""
        tell(line)

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show what is under way."""
        now, left = time.monotonic(), self.estimate.left(done, total)
        if manner().verbose and self.under_way and what != self.under_way:
            tell(f"{self.under_way}: {now - self.since:.2f} s")
        if what != self.under_way:
            self.under_way, self.since = what, now
        self.draw(what, done, total, left)
        tenth, self.counted = done % 10 == 0 and self.counted != (done, total), (done, total)
        if total > 1 and (tenth or done == total or now - self.said >= SILENT):
            self.said = now
            self._line(f"{done}/{total} {what}{', ' * bool(left)}{left}")

    def _line(self, line: str) -> None:
        """Print a line where there is no bar; the log gets it in any case."""
        if not errors.is_terminal and not manner().quiet:
            print(line, file=sys.stderr, flush=True)
        elif (log := manner().log) is not None:
            log.lines(plain(line))


@contextmanager
def progress_bar() -> Iterator[Reported]:
    """Report the progress of a long run; with --quiet to the log alone."""
    what = rich.TextColumn("{task.description:<42}", markup=False)
    left = rich.TextColumn("{task.fields[left]}", markup=False)
    columns = (what, rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), left)
    with rich.Progress(
        *columns, console=errors, transient=True, disable=manner().quiet or not errors.is_terminal
    ) as bar:
        shown = bar.add_task("loading", left="")

        def draw(what: str, done: int, total: int, left: str) -> None:
            bar.update(shown, description=what, completed=done, total=total, left=left)

        try:
            yield Reported(draw)
        finally:
            bar.update(shown, visible=False)  # so that its last state does not become a line of the log
