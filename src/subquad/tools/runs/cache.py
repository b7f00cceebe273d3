"""Results of jobs on the disk: a JSON file each, written whole or not at all, with a checksum of its contents."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from subquad.core import checksums as seals
from subquad.core import files
from subquad.core.errors import InputError
from subquad.tools.measure.group import ALONE, MeasuringGroup
from subquad.tools.measure.timing import stopwatch
from subquad.tools.runs.jobs import Job, Progress, silent
from subquad.tools.runs.records import from_plain, to_plain

PROGRESS = ".progress"
SHARED = "done"  # in a folder that jobs share, once it is made
MARK = "subquad.txt"  # in the folder PROGRESS, so that nobody else's is taken for ours
_MARK_TEXT = "Units of a run of subquad that has not ended yet: the same command resumes from them.\n"
_RUN = re.compile(r"[0-9a-f]{16}")

R = TypeVar("R")


@dataclass(frozen=True)
class CachedResult(Generic[R]):
    """The result of a finished job, and how long it took."""

    result: R
    seconds: float


class JobCache:
    """Results of finished jobs in a folder, which is made if need be.

    Of a group, the first process reads and writes; all run the jobs together and have the same results.

    Args:
        key_field: the field of a file that holds the job's key, and what a job is called in messages.
        file_name: makes the name of a job's file, without its ending, from its key.
        remedy: what the user has to do once a damaged file is removed, and what comes of it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        key_field: str,
        file_name: Callable[[str], str],
        remedy: str,
        group: MeasuringGroup = ALONE,
    ):
        self.folder, self.key_field, self.file_name, self.group = folder, key_field, file_name, group
        self.remedy = f"remove this file{remedy}"
        self.resumed = group.broadcast_from_main(self._open)  # how many results an earlier, interrupted run left

    def _open(self) -> int:
        files.make_folder(self.folder)
        files.remove_parts(self.folder)
        return len(list(self.folder.glob("*.json")))

    def has(self, key: str) -> bool:
        """True if the job of this key is finished."""
        return self.group.broadcast_from_main(self._path(key).exists)

    def get(self, job: Job[R], progress: Progress = silent) -> R:
        """The result of the job, which runs first if it is not finished."""
        return self.compute(job, progress).result

    def compute(self, job: Job[R], progress: Progress = silent) -> CachedResult[R]:
        """The job as it was finished earlier, else run now and kept; an executor may call this in a worker.

        Raises:
            InputError: what was kept is damaged, the new result cannot be written, or this machine does not have the
                folder.
        """
        if self.group.is_main and not self.folder.is_dir():
            raise InputError(
                f"{self.folder} is not on {platform.node()}: all machines must see the folder of the run, by this name"
            )
        if not self.has(job.key):
            seconds, result = stopwatch(partial(job.run, progress))
            self.group.broadcast_from_main(partial(self._write, job.key, result, seconds))
        return self.read(job.key, job.record)

    def read(self, key: str, record: Any) -> CachedResult[Any]:
        """The result of a finished job, of this type. InputError where its file is damaged."""
        return self.group.broadcast_from_main(partial(self._read, key, record))

    def forget(self) -> None:
        """Remove the results of this run; those of other runs in the same folder stay."""
        shutil.rmtree(self.folder, ignore_errors=True)
        _unclaim(self.folder.parent)

    def _write(self, key: str, result: object, seconds: float) -> None:
        plain = {self.key_field: key, "result": to_plain(result), "seconds": round(seconds, 2)}
        files.write(self._path(key), seals.sealed_json(plain))

    def _read(self, key: str, record: Any) -> CachedResult[Any]:
        path = self._path(key)
        content = seals.read_json(path, self.remedy)
        if (written := content.get(self.key_field)) != key:
            raise seals.Damaged(path, f"it is of the {self.key_field} {written!r}, not of {key!r}", self.remedy)
        return CachedResult(from_plain(record, content["result"]), content["seconds"])

    def _path(self, key: str) -> Path:
        return self.folder / f"{self.file_name(key)}.json"


def run_cache(folder: Path, settings: Any, group: MeasuringGroup = ALONE) -> JobCache:
    """The results of one run of a command, under `folder/.progress/<fingerprint of its settings>`.

    Raises:
        InputError: the folder cannot be written to, or it has a `.progress` that subquad did not make.
    """
    group.broadcast_from_main(partial(_claim, folder / PROGRESS))
    return JobCache(
        folder.absolute() / PROGRESS / hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16],
        key_field="key",
        file_name=_digest,
        remedy=" and start the same command again, which measures it anew",
        group=group,
    )


def clear(folder: Path) -> None:
    """Remove the results of all runs in this folder, those with other settings too, after its report is written.

    Other files in the folder `.progress` belong to somebody else, and stay.
    """
    progress = folder / PROGRESS
    if progress.is_symlink() or not (progress / MARK).is_file():
        return
    for path in progress.iterdir():
        if path.is_dir() and _RUN.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    _unclaim(progress)


def _unclaim(progress: Path) -> None:
    """Remove a `.progress` folder in which no run is left."""
    files.remove_parts(progress)
    with suppress(OSError):  # not empty: then the mark stays as well
        if files.empty_but_for(progress, [MARK]):
            (progress / MARK).unlink()
            progress.rmdir()


def begun_in(folder: Path) -> bool:
    """True if a run was begun in this folder, and its results are not cleared yet."""
    return (folder / PROGRESS / MARK).is_file()


def has_results(folder: Path) -> bool:
    """True if runs in this folder have kept results that are not cleared yet."""
    kept = (folder / PROGRESS).glob("*/*")
    return any(_RUN.fullmatch(path.parent.name) and not files.is_part(path) for path in kept)


def stray_in(folder: Path, key_field: str) -> Path | None:
    """Something in a folder of results and of their jobs' folders that no job wrote; None if there is nothing."""
    if folder.is_symlink() or not folder.is_dir():
        return folder if folder.is_file() and not folder.is_symlink() else None
    paths = sorted(path for path in folder.iterdir() if not files.is_part(path))
    jobs = {path.stem for path in paths if path.suffix == ".json" and _is_result(path, key_field)}
    names = jobs | {f"{job}.json" for job in jobs}
    return next((path for path in paths if path.name not in names and not (path / SHARED).is_file()), None)


def _is_result(path: Path, key_field: str) -> bool:
    """True for the result of a job, damaged or not."""
    try:
        return {key_field, "result", "seconds"} <= seals.parsed(path, "").keys()
    except InputError:
        return False


def _digest(key: str) -> str:
    """The name of a job's file: keys may be long, and hold any character."""
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def _claim(progress: Path) -> None:
    """Mark a `.progress` folder as ours; InputError where there is one that is not."""
    if (progress / MARK).is_file() and not progress.is_symlink():
        return
    if progress.is_symlink() or not files.empty_but_for(progress):
        raise InputError(f"{progress} was not made by subquad; give another folder, or remove it")
    files.write(progress / MARK, _MARK_TEXT)
