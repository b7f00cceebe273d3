"""A command in a folder that holds a finished run: the same run is shown again, another one is not overwritten."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from subquad.data.files import read_json
from subquad.errors import InputError
from subquad.report.kinds import KINDS, Kind, check, kind_of
from subquad.workflows.store import begun_in

MARK = "fingerprint"  # the key of a report under which the fingerprint of its settings stands

MODELS = ("config.json", "modules.json", "model.safetensors")  # files of a saved model


@dataclass(frozen=True)
class Claim:
    """A command with its settings, and the folder that it is about to write its report into."""

    kind: Kind
    settings: Any
    folder: Path

    @property
    def path(self) -> Path:
        """The file that holds the report."""
        return self.folder / self.kind.file

    @property
    def fingerprint(self) -> str:
        """A mark of the command and of all its settings."""
        told = json.dumps([self.kind.command, asdict(self.settings)], sort_keys=True, default=str)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def marked(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """The report with the fingerprint of its settings."""
        return {**report, MARK: self.fingerprint}

    def finished(self) -> dict[str, Any] | None:
        """The report of these settings; None where there is none yet, or a run that was cut off while it was written.

        Raises:
            InputError: the folder holds a report of other settings, or of another command.
        """
        report = self.check_same_command()
        if report is None:
            return None
        if report.get(MARK) != self.fingerprint:
            earlier = "" if MARK in report else " with an earlier version"
            raise InputError(
                f"{self.folder} holds the report of another run (`{report.get('command', self.kind.command)}`, made on "
                f"{self.day(report)}{earlier}); give another folder with --out, or --again to replace it"
            )
        if begun_in(self.folder):
            return None
        check(self.kind, self.path, report)
        return report

    def check_same_command(self) -> dict[str, Any] | None:
        """The report that the folder holds, of any settings; InputError where something else has its name."""
        if not self.path.exists():
            self._check_nobody_elses()
            return None
        report = read_json(self.path)
        found = kind_of(report)
        if found is None:
            raise InputError(f"{self.path} is not a report of subquad; remove it, or give another folder with --out")
        if found != self.kind:
            raise InputError(f"{self.folder} holds a run of {found.command}; give another folder with --out")
        return dict(report)

    def _check_nobody_elses(self) -> None:
        """InputError where the folder holds a run of another command, or a model."""
        for name in {kind.file for kind in KINDS} - {self.kind.file}:
            found = kind_of(_read(self.folder / name))
            if found is not None and found != self.kind:
                raise InputError(f"{self.folder} holds a run of {found.command}; give another folder with --out")
        for name in MODELS:
            if (self.folder / name).is_file():
                raise InputError(f"{self.folder} holds a model ({name}); give another folder with --out")

    @staticmethod
    def day(report: Mapping[str, Any]) -> str:
        """The day on which a report was made."""
        return str(report.get("created", "an unknown day")).partition("T")[0]

    def changed_since(self) -> list[str]:
        """The files and folders of the settings that are newer than the report."""
        made = self.path.stat().st_mtime
        return [str(path) for path in self._inputs() if _newest(path) > made]

    def _inputs(self) -> Iterator[Path]:
        for name, value in asdict(self.settings).items():
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, Path) or (name == "model" and each is not None):
                    yield Path(each)


def _read(path: Path) -> Any:
    """What a JSON file holds; None where there is none, or none that can be read."""
    try:
        return read_json(path) if path.is_file() else None
    except InputError:
        return None


def _newest(path: Path) -> float:
    """When a file, or a file below a folder, was last changed; 0 where there is none."""
    if not path.exists():
        return 0.0
    below = (Path(root, name) for root, _, names in os.walk(path) for name in names)
    return max((each.stat().st_mtime for each in (path, *below) if each.exists()), default=0.0)
