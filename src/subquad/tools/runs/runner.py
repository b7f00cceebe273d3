"""Runs the jobs of a long run that are not finished yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from subquad.core.messages import expect
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.runs.cache import CachedResult, JobCache, run_cache
from subquad.tools.runs.executors import LOCAL, Executor
from subquad.tools.runs.jobs import Job, JobProgress, JobResults, Progress


def run_jobs(
    jobs: Iterable[Job[Any]],
    cache: JobCache,
    progress: Progress,
    executor: Executor = LOCAL,
    has_time: Callable[[str], bool] = lambda key: True,
) -> Iterator[tuple[Job[Any], CachedResult[Any]]]:
    """Give every job with its result as it is finished, those in the cache first.

    Jobs from the cache are not reported: how long the others take is estimated from those that run. `has_time` is asked
    before each job whether it is to run; if not, it is left out.
    """
    by_key = {job.key: job for job in jobs}
    finished = [key for key in by_key if cache.has(key)]
    for key in finished:
        yield by_key[key], cache.read(key, by_key[key].record)
    missing = [job for key, job in by_key.items() if key not in finished]
    reports = JobProgress(progress, len(by_key), len(finished))
    pending = [
        replace(job, run=partial(cache.compute, job), after=tuple(key for key in job.after if key not in finished))
        for job in missing
    ]

    def due() -> Iterator[Job[Any]]:
        for job in pending:
            if has_time(job.key):
                yield job
            else:
                reports.done += 1

    for job, result in executor.run(due(), reports):
        yield by_key[job.key], result
        reports.done += 1
    progress("done", len(by_key), len(by_key))


@dataclass(kw_only=True)
class JobRun(ABC):
    """A command that measures job by job; a subclass names the jobs."""

    results: JobResults = field(default_factory=JobResults)
    resumed: int = 0  # jobs that an earlier, interrupted run had finished
    load_average: float | None = None  # the machine's load average before the run

    @abstractmethod
    def fingerprint(self) -> Any:
        """All that the results depend on, as plain data."""

    @abstractmethod
    def jobs(self) -> Iterable[Job[Any]]:
        """All jobs, in their order: some read the results of those before."""

    def finish(
        self,
        out: Path,
        progress: Progress,
        executor: Executor = LOCAL,
        group: MeasuringGroup = ALONE,
        after: Callable[[str], None] = lambda key: None,
    ) -> None:
        """Run the jobs whose results `out` does not hold from a run with the same fingerprint.

        `after` is called with the key of each job whose result is there.
        """
        cache, jobs = run_cache(out, self.fingerprint(), group), list(self.jobs())
        self.resumed = cache.resumed
        expect(progress, [self.cost(job.key) for job in jobs], self.limit())
        for job, cached in run_jobs(jobs, cache, progress, executor, self.has_time):
            self.results[job.key] = cached.result
            after(job.key)

    def cost(self, key: str) -> float:
        """The work of a job in proportion to the others; for the estimate of the time that is left."""
        return 1.0

    def limit(self) -> float | None:
        """In how many seconds the time limit is over, if there is one."""
        return None

    def has_time(self, key: str) -> bool:
        """True if a job is to run; a run with a time limit leaves out those that would exceed it."""
        return True

    @property
    def resumed_note(self) -> list[str]:
        """The note in reports on an interruption."""
        note = f"{self.resumed} of {len(self.results)} units come from an earlier, interrupted run."
        return [note] if self.resumed else []
