"""What runs pieces of work: the interface, and the loop that all executors with workers share.

    for work, result in executor.run(works, told): …      results as they come, until all works are done

A piece of work is a call that can be pickled: a `functools.partial` of a function at the top of a module, with plain
arguments. It keeps its own result on the disk (`workflows.store.Units`), so that nothing finished is lost when a
worker, or the process that started the workers, is killed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from subquad.core.errors import InputError, check_device
from subquad.tools.runs.executors.attempt import Failed

RETRIES = 3  # of a piece of work whose worker was lost, before it is given up

Progress = Callable[[str, int, int], None]  # what is under way, how much of it is done, how much there is


@dataclass(frozen=True)
class Work:
    """A piece of work.

    Attributes:
        key: its name.
        call: what runs, with a progress to report to; it can be pickled where workers are to run it.
        after: keys of works that must be done before.
        timed: whether it measures time, so that nothing else may run on its machine.
    """

    key: str
    call: Callable[[Progress], Any]
    after: tuple[str, ...] = ()
    timed: bool = False


class Told(ABC):
    """What an executor says of works that run."""

    @abstractmethod
    def started(self, work: Work, running: int) -> None:
        """A work starts; `running` is the number of works that run now."""

    @abstractmethod
    def under_way(self, work: Work, line: str) -> None:
        """How far a work is."""

    @abstractmethod
    def remark(self, line: str) -> None:
        """A line for the user: a lost worker, a failure while others still run."""


class Executor(ABC):
    """What runs works; entered, it connects to a cluster where there is one, and left, it ends all workers."""

    @property
    @abstractmethod
    def says(self) -> str:
        """What a report says of it; an empty text for a run in this process."""

    @property
    @abstractmethod
    def width(self) -> int:
        """How many works that do not measure time run at once."""

    @abstractmethod
    def run(self, works: Iterable[Work], told: Told) -> Iterator[tuple[Work, Any]]:
        """Run all works, and give each with its result as soon as it is done. `works` is read as room comes up.

        Raises:
            InputError: a work raised one, or its worker was lost too often; what runs meanwhile is finished first.
            WorkFailed: a work raised another error in a worker.
        """

    @abstractmethod
    def close(self) -> None:
        """End all workers."""

    def check_device(self, device: str) -> None:
        """InputError where works cannot compute on this device."""
        check_device(device)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class Lost:
    """A worker that went while it ran something, and how."""

    how: str


class WorkFailed(RuntimeError):
    """An error in a worker that is not the user's; its traceback is in the notes."""


class Distributed(Executor):
    """An executor with workers: the loop over works, and what is retried."""

    def __init__(self) -> None:
        self.running: dict[str, Work] = {}

    @property
    @abstractmethod
    def machines(self) -> int:
        """On how many machines works run, each of which takes one work at a time that measures time."""

    @abstractmethod
    def start(self, work: Work) -> None:
        """Have a worker run this."""

    @abstractmethod
    def ended(self) -> list[tuple[str, Any]]:
        """Wait until something ends: keys, each with a result, a `Failed` or a `Lost`."""

    @abstractmethod
    def drop(self) -> None:
        """Stop what runs."""

    def run(self, works: Iterable[Work], told: Told) -> Iterator[tuple[Work, Any]]:
        """Run all works, and give each with its result as soon as it is done."""
        source, waiting = iter(works), list[Work]()
        done, lost = set[str](), Counter[str]()
        failure: Exception | None = None
        try:
            while True:
                while failure is None and (able := self._next(source, waiting, done)) is not None:
                    self.start(able)
                    self.running[able.key] = able
                    told.started(able, len(self.running))
                if not self.running:
                    break
                for key, outcome in self.ended():
                    work = self.running.pop(key)
                    if isinstance(outcome, Lost):
                        lost[key] += 1
                        waiting.insert(0, work)
                        failure = failure or self._given_up(work, outcome, lost[key], told)
                    elif isinstance(outcome, Failed):
                        failure = failure or self._failed(work, outcome, told)
                    else:
                        done.add(key)
                        yield work, outcome
        finally:
            if self.running:
                self.drop()
                self.running.clear()
        if failure is not None:
            raise failure
        assert not waiting, f"{waiting[0].key} waits for {set(waiting[0].after) - done}, which nothing does"

    def _next(self, source: Iterator[Work], waiting: list[Work], done: set[str]) -> Work | None:
        """The first work that can start now, if any."""
        for i, work in enumerate(waiting):
            if self._has_room(work) and done.issuperset(work.after):
                return waiting.pop(i)
        while self._has_room() and (new := next(source, None)) is not None:
            if self._has_room(new) and done.issuperset(new.after):
                return new
            waiting.append(new)
        return None

    def _has_room(self, work: Work | None = None) -> bool:
        """Whether this work, or any, can start now: those that measure time run apart from the others."""
        timed = [each.timed for each in self.running.values()]
        if work is None:
            return not timed or self._has_room(next(iter(self.running.values())))
        return all(each == work.timed for each in timed) and len(timed) < (self.machines if work.timed else self.width)

    def _given_up(self, work: Work, lost: Lost, times: int, told: Told) -> InputError | None:
        """The error that ends the run where a work lost its worker too often; else it runs again."""
        if times > RETRIES:
            return InputError(
                f"the worker of {work.key!r} was lost {times} times, the last time {lost.how}; what is finished is "
                "kept. If memory ran out, give fewer --workers"
            )
        told.remark(f"the worker of {work.key!r} was lost ({lost.how}); it runs again")
        return None

    def _failed(self, work: Work, failed: Failed, told: Told) -> Exception:
        """The error of a work as this process raises it."""
        if self.running:
            told.remark(f"{work.key!r} failed; the run ends after what still runs ({len(self.running)})")
        if failed.of_the_user:
            return InputError(failed.message)
        error = WorkFailed(f"{work.key!r} failed in a worker: {failed.kind}: {failed.message}")
        error.add_note(failed.traceback)
        return error
