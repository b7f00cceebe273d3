"""Results of the units of a long run, kept so that an interrupted run goes on where it was."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from subquad import files, seals
from subquad.errors import InputError

PROGRESS = ".progress"
MARK = "subquad.txt"  # in the folder PROGRESS, so that nobody else's is taken for ours
_SAYS = "Units of a run of subquad that has not ended yet: the same command goes on from them.\n"
_RUN = re.compile(r"[0-9a-f]{16}")

Progress = Callable[[str, int, int], None]  # what is under way, units done, units in all


class Store:
    """Finished units as JSON files under `folder/.progress/<fingerprint>`, each with its digest.

    Raises:
        InputError: the folder cannot be written to, or it has a `.progress` that subquad did not make.
    """

    def __init__(self, folder: Path, settings: Any):
        text = json.dumps(settings, sort_keys=True)
        _claim(folder / PROGRESS)
        self.folder = folder / PROGRESS / hashlib.sha256(text.encode()).hexdigest()[:16]
        files.make_folder(self.folder)
        files.remove_parts(self.folder)
        self.found = len(list(self.folder.glob("*.json")))

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """The unit's result from an earlier run with the same settings, else made now and kept.

        Raises:
            InputError: the earlier result is damaged, or the new one cannot be written.
        """
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        if path.exists():
            kept = seals.read_json(path, "remove this file and start the same command again, which measures it anew")
            if kept["key"] == key:
                return kept["result"]
            raise seals.Damaged(path, f"it is that of {kept['key']}, not of {key}", "remove this file")
        result = make()
        files.write(path, seals.sealed_json({"key": key, "result": result}))
        return result

    def run(self, units: Iterable[tuple[str, Callable[[], Any]]], results: dict[str, Any], progress: Progress) -> None:
        """Put the result of each unit into `results`, in their order: some read those before."""
        units = list(units)
        for done, (key, make) in enumerate(units):
            progress(key, done, len(units))
            results[key] = self.get(key, make)
        progress("done", len(units), len(units))

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
