"""Jobs one after another in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from subquad.tools.runs.executors.base import Executor
from subquad.tools.runs.jobs import Job, JobProgress


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
