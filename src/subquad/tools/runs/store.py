"""Units of a long run: pieces of resumable work, each kept as soon as it is done, so that an interrupted run resumes.

    TIMES: Kind[dict[str, Times]] = Kind("time", dict[str, Times])          what there is, and of which type
    store.run([(TIMES("float32", 512), measure), …], results, progress)     makes those that the store does not hold
    results[TIMES("float32", 512)]                                          a dict[str, Times]

`Store` keeps the units of one run of a command, and forgets them when its report is written; `Units` keeps units where
it is told to, which is how an experiment's cells are kept.
"""

import hashlib
import json
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from subquad.core import checksums as seals
from subquad.core import files
from subquad.core.errors import InputError
from subquad.core.messages import expect, remark
from subquad.tools.measure.team import ALONE, Team
from subquad.tools.runs.executors import HERE, Executor, Told, Work
from subquad.tools.runs.records import from_plain, to_plain

PROGRESS = ".progress"
MARK = "subquad.txt"  # in the folder PROGRESS, so that nobody else's is taken for ours
_SAYS = "Units of a run of subquad that has not ended yet: the same command resumes from them.\n"
_RUN = re.compile(r"[0-9a-f]{16}")

R = TypeVar("R")
Progress = Callable[[str, int, int], None]  # what is under way, units done, units in all


@dataclass(frozen=True)
class Unit(Generic[R]):
    """The name of a unit, the type of its record, and what a user reads of it while it is made.

    Where several units are made at once, `after` has the keys of those that must be finished before it, and a unit that
    is `timed` has its machine to itself.
    """

    key: str
    record: Any = Any
    says: str = ""
    after: tuple[str, ...] = ()
    timed: bool = False


class Kind(Generic[R]):
    """Units with records of one type, named by numbers and texts: `Kind("op", Op)(512)` is the unit "op/512".

    `says` puts those into words, for the progress of a run.
    """

    def __init__(self, name: str, record: Any, says: Callable[..., str] = lambda *parts: "", *, timed: bool = False):
        self.name, self.record, self.says, self.timed = name, record, says, timed

    def __call__(self, *parts: object, after: Iterable[Unit[Any]] = ()) -> Unit[R]:
        """The unit of this kind with these parts in its name, and the units that must be finished before."""
        key, before = "/".join(map(str, (self.name, *parts))), tuple(unit.key for unit in after)
        return Unit(key, self.record, self.says(*parts), before, self.timed)


class Records:
    """The records of a run's units so far."""

    def __init__(self) -> None:
        self._by_key: dict[str, Any] = {}

    def __getitem__(self, unit: Unit[R]) -> R:
        return self._by_key[unit.key]

    def __setitem__(self, unit: Unit[R], record: R) -> None:
        self._by_key[unit.key] = record

    def __contains__(self, unit: Unit[Any]) -> bool:
        return unit.key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)

    def all(self, kind: Kind[R]) -> Iterator[R]:
        """The records of one kind, in the order in which they were made."""
        return (record for key, record in self._by_key.items() if key.partition("/")[0] == kind.name)


Job = tuple[Unit[Any], Callable[[], Any]]  # a unit and what makes its record, which pickles where workers make it


@dataclass(frozen=True)
class Kept(Generic[R]):
    """A finished unit: its record, and how long that took (not known of units that earlier versions kept)."""

    result: R
    seconds: float | None = None


class Units:
    """Finished units in a folder: a JSON file each, written whole or not at all, with a digest of what is in it.

    Args:
        folder: made if need be.
        what: a unit is called in its file and in messages.
        named: the name of a unit's file, without its ending, from its key.
        again: what the user has to do once a damaged file is removed, and what comes of it.
    """

    def __init__(self, folder: Path, *, what: str, named: Callable[[str], str], again: str):
        self.folder, self.what, self.named = folder, what, named
        self.remedy = f"remove this file{again}"
        files.make_folder(folder)
        files.remove_parts(folder)

    def kept(self, unit: Unit[R], make: Callable[[], R]) -> Kept[R]:
        """The unit as it was finished earlier, else made now and kept.

        Raises:
            InputError: what was kept is damaged, or the new record cannot be written.
        """
        if not self.has(unit):
            begun = time.perf_counter()
            made = make()
            self._write(unit, made, time.perf_counter() - begun)
        return self._read(unit)

    def _write(self, unit: Unit[R], record: R, seconds: float) -> None:
        plain = {self.what: unit.key, "result": to_plain(record), "seconds": round(seconds, 2)}
        files.write(self._path(unit), seals.sealed_json(plain))

    def _read(self, unit: Unit[R]) -> Kept[R]:
        path = self._path(unit)
        found = seals.read_json(path, self.remedy)
        if (whose := found.get(self.what)) != unit.key:
            raise seals.Damaged(path, f"it is of the {self.what} {whose!r}, not of {unit.key!r}", self.remedy)
        return Kept(from_plain(unit.record, found["result"]), found.get("seconds"))

    def has(self, unit: Unit[Any]) -> bool:
        """Whether the unit is finished."""
        return self._path(unit).exists()

    def _path(self, unit: Unit[Any]) -> Path:
        return self.folder / f"{self.named(unit.key)}.json"

    def get(self, unit: Unit[R], make: Callable[[], R]) -> R:
        """The record of `kept`."""
        return self.kept(unit, make).result

    def run(self, jobs: Iterable[Job], records: Records, progress: Progress, executor: Executor = HERE) -> None:
        """Put the record of each unit into `records`; by default in their order: some read those before."""
        for unit, one in self.each(((unit, partial(_alone, make)) for unit, make in jobs), progress, executor):
            records[unit] = one.result

    def each(
        self, jobs: Iterable[tuple[Unit[Any], Callable[[Progress], Any]]], progress: Progress, executor: Executor = HERE
    ) -> Iterator[tuple[Unit[Any], Kept[Any]]]:
        """Give every unit as it is finished, those first that were kept earlier. What makes one is told a progress.

        Units that are kept already are not reported: how long the others take is estimated from those that are made.
        """
        makers = dict(jobs)
        kept = dict.fromkeys(unit for unit in makers if self.has(unit))
        yield from ((unit, self.kept(unit, _never)) for unit in kept)
        told = Counted(progress, len(makers), len(kept), {unit.key: unit.says or unit.key for unit in makers})
        by_key = {unit.key: unit for unit in makers if unit not in kept}
        works = [
            Work(key, partial(self.made, unit, makers[unit]), tuple(k for k in unit.after if k in by_key), unit.timed)
            for key, unit in by_key.items()
        ]
        for work, one in executor.run(works, told):
            yield by_key[work.key], one
            told.done += 1
        progress("done", len(makers), len(makers))

    def made(self, unit: Unit[R], make: Callable[[Progress], R], progress: Progress) -> Kept[R]:
        """The unit, made and kept where an executor runs it. InputError on a machine that does not have the folder."""
        if not self.folder.is_dir():
            raise InputError(
                f"{self.folder} is not on {platform.node()}: all machines must see the folder of the run, by this name"
            )
        return self.kept(unit, partial(make, progress))


def _alone(make: Callable[[], R], progress: Progress) -> R:
    """A unit that reports no progress."""
    return make()


def _never() -> Any:
    raise AssertionError("a unit that is kept is not made again")


@dataclass
class Counted(Told):
    """What an executor says, as a progress of units in all."""

    progress: Progress
    total: int
    done: int
    says: Mapping[str, str]  # of each unit, by its key

    def started(self, work: Work, running: int) -> None:
        """A unit is begun."""
        others = f" and {running - 1} more" if running > 1 else ""
        self.progress(f"{self.says.get(work.key, work.key)}{others}", self.done, self.total)

    def under_way(self, work: Work, line: str) -> None:
        """A unit tells of itself."""
        self.progress(f"{work.key}: {line}", self.done, self.total)

    def remark(self, line: str) -> None:
        """Tell the user of a worker."""
        remark(self.progress, line)


class Store(Units):
    """The units of one run of a command, under `folder/.progress/<fingerprint of its settings>`.

    Of a team, the first process reads and writes; all make the units together and have the same records.

    Raises:
        InputError: the folder cannot be written to, or it has a `.progress` that subquad did not make.
    """

    def __init__(self, folder: Path, settings: Any, team: Team = ALONE):
        self.team = team
        self.found = team.broadcast_from_main(partial(self._open, folder, settings))

    def _open(self, folder: Path, settings: Any) -> int:
        """Make the folder; returns how many units it holds."""
        text = json.dumps(settings, sort_keys=True)
        _claim(folder / PROGRESS)
        super().__init__(
            folder.absolute() / PROGRESS / hashlib.sha256(text.encode()).hexdigest()[:16],
            what="key",
            named=_digest,
            again=" and start the same command again, which measures it anew",
        )
        return len(list(self.folder.glob("*.json")))

    def has(self, unit: Unit[Any]) -> bool:
        """Whether the unit is finished."""
        return self.team.broadcast_from_main(lambda: super(Store, self).has(unit))

    def _write(self, unit: Unit[R], record: R, seconds: float) -> None:
        self.team.broadcast_from_main(lambda: super(Store, self)._write(unit, record, seconds))

    def _read(self, unit: Unit[R]) -> Kept[R]:
        return self.team.broadcast_from_main(lambda: super(Store, self)._read(unit))

    def made(self, unit: Unit[R], make: Callable[[Progress], R], progress: Progress) -> Kept[R]:
        """The unit, made and kept where an executor runs it."""
        if self.team.is_main:
            return super().made(unit, make, progress)
        return self.kept(unit, partial(make, progress))

    @staticmethod
    def clear(folder: Path) -> None:
        """Forget all units, those of runs with other settings too: the report is written.

        What lies beside them in the folder `.progress` is somebody else's, and stays.
        """
        progress = folder / PROGRESS
        if progress.is_symlink() or not (progress / MARK).is_file():
            return
        for path in progress.iterdir():
            if path.is_dir() and _RUN.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        files.remove_parts(progress)
        with suppress(OSError):  # not empty: then the mark stays as well
            if files.empty_but_for(progress, [MARK]):
                (progress / MARK).unlink()
                progress.rmdir()


@dataclass(kw_only=True)
class Run:
    """What every command has that measures unit by unit."""

    results: Records = field(default_factory=Records)
    resumed: int = 0  # units that an earlier, interrupted run had finished
    load_average: float | None = None  # of the machine, before the run

    def finish(
        self,
        out: Path,
        fingerprint: Any,
        jobs: Iterable[Job],
        progress: Progress,
        executor: Executor = HERE,
        team: Team = ALONE,
    ) -> None:
        """Make the units that `out` does not hold from a run with this fingerprint: all that the records depend on."""
        store, jobs = Store(out, fingerprint, team), list(jobs)
        self.resumed = store.found
        expect(progress, [self.work(unit) for unit, _ in jobs])
        store.run(jobs, self.results, progress, executor)

    def work(self, unit: Unit[Any]) -> float:
        """How much work a unit is, in proportion to the others; for the estimate of the time that is left."""
        return 1.0

    @property
    def resumed_note(self) -> list[str]:
        """What a report says of an interruption."""
        some = f"{self.resumed} of {len(self.results)} units come from an earlier, interrupted run."
        return [some] if self.resumed else []


def _digest(key: str) -> str:
    """The name of a unit's file: keys may be long, and hold any character."""
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def begun_in(folder: Path) -> bool:
    """Whether a run was begun in this folder, and its units are not cleared yet."""
    return (folder / PROGRESS / MARK).is_file()


def _claim(progress: Path) -> None:
    """Mark a `.progress` folder as ours; InputError where there is one that is not."""
    if (progress / MARK).is_file() and not progress.is_symlink():
        return
    if progress.is_symlink() or not files.empty_but_for(progress):
        raise InputError(
            f"{progress} was not made by this version of subquad; give another folder, or remove it if it is of a run "
            "that an earlier version left unfinished"
        )
    files.write(progress / MARK, _SAYS)
