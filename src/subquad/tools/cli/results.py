"""The folder of a command's results: who works in it, and the report that it may hold already."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.core.errors import InputError
from subquad.tools.cli.finished import Claim
from subquad.tools.cli.output import tell
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.runs.alone import alone_in
from subquad.tools.runs.cache import clear


@dataclass(frozen=True)
class ResultsFolder:
    """The folder into which a command writes its results.

    Attributes:
        claim: the command with its settings, and the folder.
        group: the processes that measure; the first one writes.
        finished: the report of this run in the folder; None: it is to be measured.
    """

    claim: Claim
    group: MeasuringGroup
    finished: Any

    def written(self, report: Any, write: Callable[[Any, Path], list[Path]]) -> Any:
        """The report, written with the settings that were asked for unless it is the one in the folder.

        Results of jobs that were kept meanwhile are forgotten then.
        """
        if self.finished is not None and report is self.finished:
            return self.finished
        marked = self.claim.marked(report)
        if self.group.is_main:
            write(marked, self.claim.folder)
            clear(self.claim.folder)
        return marked

    def refreshed(self, report: Any, write: Callable[[Any, Path], list[Path]]) -> None:
        """Write the report of an unfinished run; the run continues, and writes it again."""
        if self.group.is_main:
            write(self.claim.marked(report), self.claim.folder)


@contextmanager
def results_in(
    claim: Claim, check: Callable[[], None], again: bool, group: MeasuringGroup = ALONE
) -> Iterator[ResultsFolder]:
    """Lock the folder while a command works in it, and report if it contains this run already.

    `check` raises for what is wrong in the settings, before the folder is refused. With `again`
    the command measures again.
    """

    def finished_report() -> Any:
        try:
            return claim.finished(again)
        except InputError:
            check()
            raise

    with alone_in(claim.folder) if group.is_main else nullcontext():
        finished = group.broadcast_from_main(finished_report)
        if finished is not None:
            tell(f"{claim.folder} contains this run, finished on {claim.day(finished)}; --again measures it again")
            for name in claim.changed_since() if group.is_main else ():
                tell(f"warning: {name} has changed since that run")
        yield ResultsFolder(claim, group, finished)
