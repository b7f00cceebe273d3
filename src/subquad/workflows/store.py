"""Units of a long run: pieces of resumable work, each kept as soon as it is done, so that an interrupted run resumes.

    TIMES: Kind[dict[str, Times]] = Kind("time", dict[str, Times])          what there is, and of which type
    store.run([(TIMES("float32", 512), measure), …], results, progress)     makes those that the store does not hold
    results[TIMES("float32", 512)]                                          a dict[str, Times]

`Store` keeps the units of one run of a command, and forgets them when its report is written; `Units` keeps units where
it is told to, which is how an experiment's cells are kept.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from subquad import files, seals
from subquad.errors import InputError
from subquad.expected import expect
from subquad.workflows.records import from_plain, to_plain

PROGRESS = ".progress"
MARK = "subquad.txt"  # in the folder PROGRESS, so that nobody else's is taken for ours
_SAYS = "Units of a run of subquad that has not ended yet: the same command resumes from them.\n"
_RUN = re.compile(r"[0-9a-f]{16}")

R = TypeVar("R")
Progress = Callable[[str, int, int], None]  # what is under way, units done, units in all


@dataclass(frozen=True)
class Unit(Generic[R]):
    """The name of a unit, the type of its record, and what a user reads of it while it is made."""

    key: str
    record: Any = Any
    says: str = ""


class Kind(Generic[R]):
    """Units with records of one type, named by numbers and texts: `Kind("op", Op)(512)` is the unit "op/512".

    `says` puts those into words, for the progress of a run.
    """

    def __init__(self, name: str, record: Any, says: Callable[..., str] = lambda *parts: ""):
        self.name, self.record, self.says = name, record, says

    def __call__(self, *parts: object) -> Unit[R]:
        """The unit of this kind with these parts in its name."""
        return Unit("/".join(map(str, (self.name, *parts))), self.record, self.says(*parts))


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


Job = tuple[Unit[Any], Callable[[], Any]]  # a unit and what makes its record


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
        path = self.folder / f"{self.named(unit.key)}.json"
        if not path.exists():
            begun = time.perf_counter()
            result = to_plain(make())
            seconds = round(time.perf_counter() - begun, 2)
            files.write(path, seals.sealed_json({self.what: unit.key, "result": result, "seconds": seconds}))
        found = seals.read_json(path, self.remedy)
        if (whose := found.get(self.what)) != unit.key:
            raise seals.Damaged(path, f"it is of the {self.what} {whose!r}, not of {unit.key!r}", self.remedy)
        return Kept(from_plain(unit.record, found["result"]), found.get("seconds"))

    def has(self, unit: Unit[Any]) -> bool:
        """Whether the unit is finished."""
        return (self.folder / f"{self.named(unit.key)}.json").exists()

    def get(self, unit: Unit[R], make: Callable[[], R]) -> R:
        """The record of `kept`."""
        return self.kept(unit, make).result

    def run(self, jobs: Iterable[Job], records: Records, progress: Progress) -> None:
        """Put the record of each unit into `records`, in their order: some read those before.

        Units that are kept already are not reported: how long the others take is estimated from those that are made.
        """
        jobs = list(jobs)
        for done, (unit, make) in enumerate(jobs):
            if not self.has(unit):
                progress(unit.says or unit.key, done, len(jobs))
            records[unit] = self.get(unit, make)
        progress("done", len(jobs), len(jobs))


class Store(Units):
    """The units of one run of a command, under `folder/.progress/<fingerprint of its settings>`.

    Raises:
        InputError: the folder cannot be written to, or it has a `.progress` that subquad did not make.
    """

    def __init__(self, folder: Path, settings: Any):
        text = json.dumps(settings, sort_keys=True)
        _claim(folder / PROGRESS)
        super().__init__(
            folder / PROGRESS / hashlib.sha256(text.encode()).hexdigest()[:16],
            what="key",
            named=lambda key: hashlib.sha256(key.encode()).hexdigest()[:24],
            again=" and start the same command again, which measures it anew",
        )
        self.found = len(list(self.folder.glob("*.json")))

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

    def finish(self, out: Path, fingerprint: Any, jobs: Iterable[Job], progress: Progress) -> None:
        """Make the units that `out` does not hold from a run with this fingerprint: all that the records depend on."""
        store, jobs = Store(out, fingerprint), list(jobs)
        self.resumed = store.found
        expect(progress, [self.work(unit) for unit, _ in jobs])
        store.run(jobs, self.results, progress)

    def work(self, unit: Unit[Any]) -> float:
        """How much work a unit is, in proportion to the others; for the estimate of the time that is left."""
        return 1.0

    @property
    def resumed_note(self) -> list[str]:
        """What a report says of an interruption."""
        some = f"{self.resumed} of {len(self.results)} units come from an earlier, interrupted run."
        return [some] if self.resumed else []


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
