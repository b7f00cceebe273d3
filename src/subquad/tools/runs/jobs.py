"""Jobs: pieces of a long run, each of whose results is kept as soon as it is there, so that the run can be resumed.

    TIMES: JobKind[dict[str, Times]] = JobKind("time", dict[str, Times])     jobs of one kind, and the type of a result
    TIMES.job("float32", 512, run=measure)                                   the job "time/float32/512"
    results[TIMES("float32", 512)]                                           its result, a dict[str, Times]

`runs.cache` keeps results on the disk, `runs.runner` runs jobs whose results are not there yet, and `runs.executors`
are where they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from subquad.core.messages import note

R = TypeVar("R")
Progress = Callable[[str, int, int], None]  # what is under way, how much of it is done, how much there is


def silent(what: str, done: int, total: int) -> None:
    """A progress that nobody watches."""


class JobKey(str, Generic[R]):
    """The name of a job whose result has the type R."""


@dataclass(frozen=True)
class Job(Generic[R]):
    """A piece of resumable work.

    Attributes:
        key: its name.
        run: makes the result; called with a progress. Workers need it pickled, so that it is a `functools.partial` of a
            function at the top of a module, with plain arguments.
        after: keys of jobs that must be finished before.
        timed: whether it measures time, so that nothing else may run on its machine.
        record: the type of the result, for reading it from JSON (`runs.records`).
        label: the text that users read while it runs; default: the key.
    """

    key: str
    run: Callable[..., R]
    after: tuple[str, ...] = ()
    timed: bool = False
    record: Any = Any
    label: str = ""


class JobKind(Generic[R]):
    """Jobs with results of one type, named by numbers and texts; `label` makes what a user reads from those."""

    def __init__(self, name: str, record: Any, label: Callable[..., str] = lambda *parts: "", *, timed: bool = False):
        self.name, self.record, self.label, self.timed = name, record, label, timed

    def __call__(self, *parts: object) -> JobKey[R]:
        """The key of the job of this kind with these parts in its name."""
        return JobKey("/".join(map(str, (self.name, *parts))))

    def job(self, *parts: object, run: Callable[[], R], after: Iterable[str] = ()) -> Job[R]:
        """The job of this kind with these parts in its name, which reports no progress of its own."""
        label = self.label(*parts)
        return Job(self(*parts), partial(_without_progress, run), tuple(after), self.timed, self.record, label)


class JobResults:
    """The results of a run's jobs so far."""

    def __init__(self) -> None:
        self._by_key: dict[str, Any] = {}

    def __getitem__(self, key: JobKey[R]) -> R:
        return self._by_key[key]

    def __setitem__(self, key: str, result: object) -> None:
        self._by_key[key] = result

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)

    def all(self, kind: JobKind[R]) -> Iterator[R]:
        """The results of one kind, in the order in which they were made."""
        return (result for key, result in self._by_key.items() if key.partition("/")[0] == kind.name)


@dataclass
class JobProgress:
    """Reports jobs that run as a progress over all jobs of a run."""

    progress: Progress
    total: int
    done: int = 0

    def started(self, job: Job[Any], running: int) -> None:
        """Report that a job starts; `running` is the number of jobs that run now."""
        others = f" and {running - 1} more" if running > 1 else ""
        self.progress(f"{job.label or job.key}{others}", self.done, self.total)

    def update(self, job: Job[Any], what: str, done: int, total: int) -> None:
        """Report how far a job is."""
        self.progress(f"{job.key}: {what} {done}/{total}", self.done, self.total)

    def message(self, line: str) -> None:
        """Tell the user of a lost worker, or of a failure while other jobs still run."""
        note(self.progress, line)


def _without_progress(run: Callable[[], R], progress: Progress) -> R:
    return run()
