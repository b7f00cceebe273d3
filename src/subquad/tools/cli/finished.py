"""A command in a folder that holds a finished run: the same run is shown again, another one is not overwritten."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from subquad.core.errors import InputError
from subquad.core.reading import read_json
from subquad.tools.cli.kinds import Kind, kind_of, record_of
from subquad.tools.cli.plugins import kinds
from subquad.tools.runs.cache import begun_in
from subquad.tools.runs.options import options
from subquad.tools.runs.records import to_plain

ASKED = "asked"  # the key of a report with the settings that the command was given
RANKS = "ranks"  # in addition, if there were several
FEW = 5  # settings that a message names
LONGEST = 60  # characters of a value in a message

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
            InputError: the folder contains a report of other settings (unless `again`), or of another command.
        """
        report = self.check_same_command()
        if report is None or again:
            return None
        if ASKED not in report:
            self._refuse(report, "with an earlier version")
        if differing := self._differing(report[ASKED]):
            self._refuse(report, f"with {differing}")
        if begun_in(self.folder):
            return None
        return record_of(self.kind, self.path, report)

    def _refuse(self, report: Mapping[str, Any], difference: str) -> NoReturn:
        raise InputError(
            f"{self.folder} contains the report of another run, made on {self.day(report)} {difference}; give another "
            "folder with --out, or --again to replace it"
        )

    def _differing(self, earlier: Mapping[str, Any]) -> str:
        """The settings that were measured with other values, with both; nothing where there are none."""
        known, here = options(type(self.settings)), self.asked
        names = [name for name in here if name != RANKS and not (name in known and known[name].reading)]
        differing = [
            f"{known[name].label if name in known else name} {_shown(earlier.get(name))} (now {_shown(here[name])})"
            for name in names
            if earlier.get(name) != here[name]
        ]
        if (before := earlier.get(RANKS, 1)) != self.ranks:
            differing.insert(0, f"{RANKS} {before} (now {self.ranks})")
        more = f" and {len(differing) - FEW} more" if len(differing) > FEW else ""
        return f"{', '.join(differing[:FEW])}{more}"

    def check_same_command(self) -> dict[str, Any] | None:
        """The report in the folder, of any settings; InputError if something else has its name."""
        if not self.path.exists():
            self._check_nobody_elses()
            return None
        report = read_json(self.path)
        other = kind_of(report, kinds())
        if other is None:
            raise InputError(f"{self.path} is not a report of subquad; remove it, or give another folder with --out")
        if other != self.kind:
            raise InputError(f"{self.folder} contains a run of {other.command}; give another folder with --out")
        return dict(report)

    def _check_nobody_elses(self) -> None:
        """InputError if the folder contains a run of another command, or a model."""
        for name in {kind.file for kind in kinds()} - {self.kind.file}:
            other = kind_of(_read(self.folder / name), kinds())
            if other is not None and other != self.kind:
                raise InputError(f"{self.folder} contains a run of {other.command}; give another folder with --out")
        for name in MODELS:
            if (self.folder / name).is_file():
                raise InputError(f"{self.folder} contains a model ({name}); give another folder with --out")

    @staticmethod
    def day(report: Any) -> str:
        """The day on which a report was made."""
        return str(to_plain(report).get("created", "an unknown day")).partition("T")[0]

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
    """The content of a JSON file; None if there is none, or it cannot be read."""
    try:
        return read_json(path) if path.is_file() else None
    except InputError:
        return None


def _shown(value: Any) -> str:
    """A setting in a message, which is cut where it is long."""
    text = " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
    return f"'{text if len(text) <= LONGEST else text[: LONGEST - 1] + '…'}'" if text else "not given"


def _newest(path: Path) -> float:
    """The time of the last change of a path, or of a file below it; 0 if it does not exist."""
    if not path.exists():
        return 0.0
    below = (Path(root, name) for root, _, names in os.walk(path) for name in names)
    return max((each.stat().st_mtime for each in (path, *below) if each.exists()), default=0.0)
