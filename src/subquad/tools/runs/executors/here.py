"""Works one after another in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from subquad.tools.runs.executors.base import Executor, Told, Work


class Here(Executor):
    """Runs works in their order, in this process; an error goes on as it is."""

    says = ""
    width = 1

    def run(self, works: Iterable[Work], told: Told) -> Iterator[tuple[Work, Any]]:
        """Run all works, and give each with its result."""
        for work in works:
            told.started(work, 1)
            yield work, work.call(partial(self._relay, work, told))

    @staticmethod
    def _relay(work: Work, told: Told, what: str, done: int, total: int) -> None:
        told.under_way(work, f"{what} {done}/{total}")

    def close(self) -> None:
        """There is nothing to end."""
