"""Results of the units of a long run, kept so that an interrupted run goes on where it was."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from subquad.errors import InputError

PROGRESS = ".progress"

Progress = Callable[[str, int, int], None]  # what is under way, units done, units in all


class Store:
    """Finished units as JSON files under `folder/.progress/<fingerprint>`."""

    def __init__(self, folder: Path, settings: Any):
        text = json.dumps(settings, sort_keys=True)
        self.folder = folder / PROGRESS / hashlib.sha256(text.encode()).hexdigest()[:16]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write to the folder {folder}: {error.strerror}") from None
        self.found = len(list(self.folder.glob("*.json")))

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """The unit's result from an earlier run with the same settings, else made now and kept."""
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        if path.exists():
            return json.loads(path.read_text())
        result = make()
        part = path.with_suffix(".part")
        part.write_text(json.dumps(result))
        os.replace(part, path)
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
        """Forget all units, those of runs with other settings too: the report is written."""
        shutil.rmtree(folder / PROGRESS, ignore_errors=True)
