"""The folder of a command's results: a finished run is shown again, and another one is not overwritten."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from subquad.core import checksums as seals
from subquad.core import files
from subquad.core.errors import InputError
from subquad.core.reading import read_json
from subquad.tools.cli.folder import (
    ELSEWHERE,
    Differing,
    RunFolder,
    check_other_reports,
    differences,
    end_removal,
    is_report,
    refusal,
)
from subquad.tools.cli.kinds import Kind, record_of
from subquad.tools.cli.output import tell
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.runs import processes
from subquad.tools.runs.alone import BEGUN, alone_in
from subquad.tools.runs.cache import begun_in, clear, has_results
from subquad.tools.runs.options import options
from subquad.tools.runs.records import to_plain

ASKED = "asked"  # the key of a report with the settings that the command was given
RANKS = "ranks"  # in addition, if there were several
RUN_AGAIN = "--again runs it again"
MODELS = ("config.json", "modules.json", "model.safetensors")  # files of a saved model


@dataclass(frozen=True)
class Claim:
    """A command with its settings, and the folder that it is about to write its report into."""

    kind: Kind
    settings: Any
    folder: Path
    ranks: int = 1

    @property
    def path(self) -> Path:
        """The file that holds the report."""
        return self.folder / self.kind.file

    @property
    def asked(self) -> dict[str, Any]:
        """The settings as plain data."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self.settings), default=str))
        return plain if self.ranks == 1 else {**plain, RANKS: self.ranks}

    def marked(self, report: Any) -> Any:
        """The report with the settings that it was asked for with."""
        return {**report, ASKED: self.asked} if isinstance(report, Mapping) else replace(report, asked=self.asked)

    def finished(self, again: bool = False) -> Any:
        """The report of these settings, some that only change how results are read aside; None where there is none.

        There is none before the first run, after one that was cut off while its report was written, and `again`.

        Raises:
            InputError: the folder contains a report or an interrupted run of other settings (unless `again`), or of
                another command.
        """
        content = self._report()
        if content is None or again:
            self._check_begun(again)
            return None
        report = self.kind.plain(content)
        run = f"the report of another run, made on {self.day(report)}"
        if ASKED not in report:
            raise InputError(
                f"{self.folder} contains {run}, which did not record its settings; {ELSEWHERE}, or --again to replace "
                "it"
            )
        if differing := self._differing(report[ASKED]):
            raise refusal(self.folder, run, differing)
        if not begun_in(self.folder):
            return record_of(self.kind, self.path, content)
        self._check_begun(again)
        return None

    def begin(self) -> None:
        """Record the settings, until the run is finished: another run must not clear the results of its jobs."""
        begun = {"command": self.kind.command, ASKED: self.asked}
        files.write(self.folder / BEGUN, seals.sealed_json(begun))

    def end(self) -> None:
        """Remove the record of the settings, unless the run was interrupted after its first jobs."""
        if not has_results(self.folder):
            (self.folder / BEGUN).unlink(missing_ok=True)

    def _check_begun(self, again: bool) -> None:
        path = self.folder / BEGUN
        if not (path.exists() and has_results(self.folder)):
            return
        begun = seals.read_json(path, f"remove this file, or {ELSEWHERE}")
        if begun["command"] != self.kind.command:
            raise InputError(f"{self.folder} contains an interrupted run of {begun['command']}; {ELSEWHERE}")
        if not again and (differing := self._differing(begun[ASKED])):
            raise refusal(self.folder, "an interrupted run", differing)

    def _differing(self, earlier: Mapping[str, Any]) -> Differing:
        """The settings that were measured with other values, as the command line calls them."""
        known, (before, now) = options(type(self.settings)), ({RANKS: 1, **each} for each in (earlier, self.asked))
        return {
            known[name].label if name in known else name: both
            for name, both in differences(before, now).items()
            if name in now and not (name in known and known[name].reading)
        }

    def _report(self) -> dict[str, Any] | None:
        """The report in the folder, of any settings; InputError for a model, another command's run or another file."""
        if self.path.exists():
            remedy = f"remove it, or {ELSEWHERE}"
            try:
                content = read_json(self.path)
            except InputError as error:
                raise InputError(f"{error}; {remedy}") from None
            if not is_report(content, self.kind.command, self.folder):
                from subquad.hf.adapters import is_adapter  # which needs transformers

                if is_adapter(content):
                    what = f"an adapter that sq.hf.save_adapter saved ({self.path.name})"
                    raise InputError(f"{self.folder} contains {what}; {ELSEWHERE}")
                raise InputError(f"{self.path} is not a report of subquad; {remedy}")
            return dict(content)
        check_other_reports(self.folder, self.kind.command)
        for name in MODELS:
            if (self.folder / name).is_file():
                raise InputError(f"{self.folder} contains a model ({name}); {ELSEWHERE}")
        for name in self.kind.beside if not has_results(self.folder) else ():  # there are in its own interrupted run
            if (self.folder / name).is_file():
                raise InputError(f"{self.folder} contains {name} without a report of {self.kind.command}; {ELSEWHERE}")
        return None

    @staticmethod
    def day(report: Any) -> str:
        """The day on which a report was made."""
        return str(to_plain(report).get("created", "an unknown day")).partition("T")[0]

    def changed_since(self) -> list[str]:
        """The files and folders of the settings that are newer than the report, the run's own folder aside."""
        made = self.path.stat().st_mtime
        return [str(path) for path in self._inputs() if _newest(path, self.folder) > made]

    def _inputs(self) -> Iterator[Path]:
        for name, value in asdict(self.settings).items():
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, Path) or (name == "model" and each is not None):
                    yield Path(each)


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
            end_removal(claim.folder)
            return claim.finished(again)
        except InputError:
            check()
            raise

    with alone_in(claim.folder) if group.is_main else nullcontext():
        finished = group.broadcast_from_main(finished_report)
        if finished is None and group.is_main:
            claim.begin()
        if finished is not None:
            tell(f"{claim.folder} contains this run, finished on {claim.day(finished)}; {RUN_AGAIN}")
            for name in claim.changed_since() if group.is_main else ():
                tell(f"warning: {name} has changed since that run")
        try:
            yield ResultsFolder(claim, group, finished)
        finally:
            if group.is_main:
                claim.end()


def finished_in(folder: RunFolder, kind: Kind, again: bool) -> Any:
    """The record of a finished run in its folder, which is reported; None if there is something to run."""
    content = folder.finished(again)
    record = None if content is None else record_of(kind, folder.results, content)
    if record is not None and processes.number() == 0:
        tell(f"{folder.folder} contains this run, finished; {RUN_AGAIN}")
    return record


def _newest(path: Path, apart: Path) -> float:
    """The time of the last change of a path, or of a file below it, one folder apart; 0 if there is none."""
    roots = ((Path(root), names) for root, _, names in os.walk(path) if apart.resolve() not in _upwards(Path(root)))
    below = (root / name for root, names in roots for name in names)
    first = [] if path.resolve() == apart.resolve() else [path]
    return max((each.stat().st_mtime for each in (*first, *below) if each.exists()), default=0.0)


def _upwards(folder: Path) -> tuple[Path, ...]:
    """A folder, and those that it is in."""
    return (folder.resolve(), *folder.resolve().parents)
