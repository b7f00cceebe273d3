"""The run in a folder: a command continues its own run, shows it once it is finished, and refuses another one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.core import checksums as seals
from subquad.core import files
from subquad.core.errors import InputError
from subquad.tools.runs.alone import RUNNING

FEW = 5  # settings that a message names
LONGEST = 60  # characters of a value in a message
ELSEWHERE = "give another folder with --out"

Settings = Mapping[str, Any]  # as plain data
Differing = dict[str, tuple[Any, Any]]  # settings by name, with the value of the folder's run and the one asked for


def differences(earlier: Settings, asked: Settings) -> Differing:
    """The settings that differ; a setting that is missing is None."""
    pairs = {name: (earlier.get(name), asked.get(name)) for name in {**asked, **earlier}}
    return {name: (before, now) for name, (before, now) in pairs.items() if before != now}


def refusal(folder: Path, run: str, differing: Differing, *, replaceable: bool = True) -> InputError:
    """The error for a folder that contains another run: some of the settings that differ, and the remedies."""
    texts = [f"{name} {_shown(before)} (now {_shown(now)})" for name, (before, now) in differing.items()]
    more = f" and {len(texts) - FEW} more" if len(texts) > FEW else ""
    remedy = f"{ELSEWHERE}, or --again to replace it" if replaceable else ELSEWHERE
    return InputError(f"{folder} contains {run} with {', '.join(texts[:FEW])}{more}; {remedy}")


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run that records its settings when it begins, and writes `results.json` last.

    The same command continues the run. A finished run is kept unless it is to run again; an unfinished run is never
    replaced.

    Attributes:
        command: the command, as users call it.
        asked: its settings.
        file: the name of the file that holds them, with the functions that `read` and `write` it.
        outputs: patterns of the names that a run makes until it is finished.
        differing: the settings that make an earlier run another one, whose names have dots where tables are nested.
        is_complete: tells whether the results have all that is asked for.
    """

    folder: Path
    command: str
    asked: Settings
    file: str
    outputs: tuple[str, ...]
    read: Callable[[Path], Settings] = lambda path: seals.parsed(path, ELSEWHERE)
    write: Callable[[Settings], str] = lambda asked: json.dumps(asked, indent=1)
    differing: Callable[[Settings, Settings], Differing] = differences
    is_complete: Callable[[Settings], bool] = lambda content: True

    @property
    def results(self) -> Path:
        """The file that marks the run as finished."""
        return self.folder / "results.json"

    def finished(self, again: bool = False) -> dict[str, Any] | None:
        """The content of `results.json` if this run is finished; None if there is something to run.

        Raises:
            InputError: the folder contains another run, unless it is finished and `again` replaces it; or something
                else; or a file in it is damaged.
        """
        earlier, finished = self._earlier(), self.results.exists()
        if earlier is None or (again and finished):
            return None
        if differing := self.differing(_flat(earlier), _flat(json.loads(json.dumps(self.asked)))):
            run = "another run" if finished else "another run, unfinished,"
            raise refusal(self.folder, run, differing, replaceable=finished)
        if not finished:
            return None
        remedy = "remove this file; the same command then writes it again"
        content = seals.parsed(self.results, remedy)
        try:
            return content if self.is_complete(content) else None
        except (KeyError, TypeError):
            raise seals.Damaged(self.results, f"it has no results of {self.command}", remedy) from None

    def begin(self, again: bool = False) -> None:
        """Record the settings of a run that begins or continues; with `again`, a finished run is removed first.

        Raises:
            InputError: as `finished`.
        """
        self.finished(again)
        if again and self.results.exists():
            self.clear()
        self.results.unlink(missing_ok=True)  # a longer run is not finished, and `again` must not remove it
        files.write(self.folder / self.file, self.write(self.asked))

    def clear(self) -> None:
        """Remove the run; what marks it as finished, and as a run, comes last."""
        for path in [*self._outputs(), self.results, self.folder / self.file]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _earlier(self) -> Settings | None:
        """The settings of the run in the folder; None if there is none, or one that has not done anything yet."""
        path, allowed = self.folder / self.file, [*RUNNING]
        if path.exists():
            below = (each for top in self._outputs() for each in (top, *top.rglob("*")))
            if self.results.exists() or any(each.is_file() and not files.is_part(each) for each in below):
                return self.read(path)
            allowed += [self.file, *(top.name for top in self._outputs())]
        if not files.empty_but_for(self.folder, allowed):
            if path.exists():
                return self.read(path)
            raise InputError(f"{self.folder} is not empty and contains no run of {self.command}; {ELSEWHERE}")
        return None

    def _outputs(self) -> Iterator[Path]:
        return (path for pattern in self.outputs for path in self.folder.glob(pattern))


def _flat(settings: Settings) -> dict[str, Any]:
    """Settings in nested tables, by their names with dots."""
    named: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            value = {str(number): each for number, each in enumerate(value)}
        named |= {f"{name}.{n}": v for n, v in _flat(value).items()} if isinstance(value, dict) else {name: value}
    return named


def _shown(value: Any) -> str:
    """A setting in a message, which is cut where it is long."""
    text = " ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
    return f"'{text if len(text) <= LONGEST else text[: LONGEST - 1] + '…'}'" if text else "not given"
