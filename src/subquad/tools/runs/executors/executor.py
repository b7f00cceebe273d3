"""Executors of jobs: the interface, the one of this process, and the loop that all executors with workers share.

    for job, result in executor.run(jobs, reports): …      results as they come, until all jobs are done

A job keeps its own result on the disk (`runs.cache.JobCache.compute`), so that nothing finished is lost when a worker,
or the process that started the workers, is killed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from subquad.core.errors import InputError, check_device
from subquad.tools.runs.executors.attempt import JobFailure
from subquad.tools.runs.jobs import Job, JobProgress

RETRIES = 3  # of a job whose worker was lost, before it is given up


class Executor(ABC):
    """The executor of jobs; entered, it connects to a cluster where there is one, and left, it ends all workers."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The description in reports; empty for a run in this process."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The number of jobs that run at once, if they do not measure time."""

    @abstractmethod
    def run(self, jobs: Iterable[Job[Any]], reports: JobProgress) -> Iterator[tuple[Job[Any], Any]]:
        """Run all jobs, and give each with its result as soon as it is done. `jobs` is read as room comes up.

        Raises:
            InputError: a job raised one, or its worker was lost too often; what runs meanwhile is finished first.
            WorkerError: a job raised another error in a worker.
        """

    @abstractmethod
    def close(self) -> None:
        """End all workers."""

    def check_device(self, device: str) -> None:
        """InputError where jobs cannot compute on this device."""
        check_device(device)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LocalExecutor(Executor):
    """Runs jobs in their order, in this process; an error is raised as it is."""

    description = ""
    width = 1

    def run(self, jobs: Iterable[Job[Any]], reports: JobProgress) -> Iterator[tuple[Job[Any], Any]]:
        """Run all jobs, and give each with its result."""
        for job in jobs:
            reports.started(job, 1)
            yield job, job.run(partial(reports.update, job))

    def close(self) -> None:
        """There is nothing to end."""


@dataclass(frozen=True)
class LostWorker:
    """A worker that went while it ran something, and how."""

    reason: str


class WorkerError(RuntimeError):
    """An error in a worker that is not the user's; its traceback is in the notes."""


class WorkerExecutor(Executor):
    """An executor with workers: the loop over jobs, and what is retried."""

    def __init__(self) -> None:
        self.running: dict[str, Job[Any]] = {}

    @property
    @abstractmethod
    def machines(self) -> int:
        """On how many machines jobs run, each of which takes one job at a time that measures time."""

    @abstractmethod
    def start(self, job: Job[Any]) -> None:
        """Have a worker run this."""

    @abstractmethod
    def ended(self) -> list[tuple[str, Any]]:
        """Wait until something ends: keys, each with a result, a `JobFailure` or a `LostWorker`."""

    @abstractmethod
    def drop(self) -> None:
        """Stop what runs."""

    def run(self, jobs: Iterable[Job[Any]], reports: JobProgress) -> Iterator[tuple[Job[Any], Any]]:
        """Run all jobs, and give each with its result as soon as it is done."""
        source, waiting = iter(jobs), list[Job[Any]]()
        done, lost = set[str](), Counter[str]()
        failure: Exception | None = None
        try:
            while True:
                while failure is None and (able := self._next(source, waiting, done)) is not None:
                    self.start(able)
                    self.running[able.key] = able
                    reports.started(able, len(self.running))
                if not self.running:
                    break
                for key, outcome in self.ended():
                    job = self.running.pop(key)
                    if isinstance(outcome, LostWorker):
                        lost[key] += 1
                        waiting.insert(0, job)
                        failure = failure or self._lost_too_often(job, outcome, lost[key], reports)
                    elif isinstance(outcome, JobFailure):
                        failure = failure or self._failed(job, outcome, reports)
                    else:
                        done.add(key)
                        yield job, outcome
        finally:
            if self.running:
                self.drop()
                self.running.clear()
        if failure is not None:
            raise failure
        assert not waiting, f"{waiting[0].key} waits for {set(waiting[0].after) - done}, which nothing does"

    def _next(self, source: Iterator[Job[Any]], waiting: list[Job[Any]], done: set[str]) -> Job[Any] | None:
        """The first job that can start now, if any."""
        for i, job in enumerate(waiting):
            if self._has_room(job) and done.issuperset(job.after):
                return waiting.pop(i)
        while self._has_room() and (new := next(source, None)) is not None:
            if self._has_room(new) and done.issuperset(new.after):
                return new
            waiting.append(new)
        return None

    def _has_room(self, job: Job[Any] | None = None) -> bool:
        """True if this job, or any, can start now: those that measure time run apart from the others."""
        timed = [each.timed for each in self.running.values()]
        if job is None:
            return not timed or self._has_room(next(iter(self.running.values())))
        return all(each == job.timed for each in timed) and len(timed) < (self.machines if job.timed else self.width)

    def _lost_too_often(self, job: Job[Any], lost: LostWorker, times: int, reports: JobProgress) -> InputError | None:
        """The error that ends the run where a job lost its worker too often; else it runs again."""
        if times > RETRIES:
            return InputError(
                f"the worker of {job.key!r} was lost {times} times, the last time {lost.reason}; what is finished is "
                "kept. If memory ran out, give fewer --workers"
            )
        reports.message(f"the worker of {job.key!r} was lost ({lost.reason}); it runs again")
        return None

    def _failed(self, job: Job[Any], failed: JobFailure, reports: JobProgress) -> Exception:
        """The error of a job as this process raises it."""
        if self.running:
            reports.message(f"{job.key!r} failed; the run ends after what still runs ({len(self.running)})")
        if failed.is_input_error:
            return InputError(failed.message)
        error = WorkerError(f"{job.key!r} failed in a worker: {failed.kind}: {failed.message}")
        error.add_note(failed.traceback)
        return error
