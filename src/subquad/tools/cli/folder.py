"""The run in a folder: a command continues its own run, shows it once it is finished, and refuses another one."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.core import checksums as seals
from subquad.core import files
from subquad.core.errors import InputError
from subquad.core.reading import read_json
from subquad.tools.cli.commands import kinds
from subquad.tools.cli.kinds import kind_of
from subquad.tools.runs.alone import RUNNING

FEW = 5  # settings that a message names
LONGEST = 60  # characters of a value in a message
ELSEWHERE = "give another folder with --out"
REMOVE = "remove this file; the same command then writes it again"
UNRECORDED = ("device", "data", "run")  # settings that earlier versions did not record, which count as equal then
REMOVING = ".subquad.removing"  # in a folder from which a run is removed: the names that go with it, in their order

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


def device_and_data(device: str, data: Path | None) -> dict[str, str | None]:
    """The kind of device and the folder of data of a run, as it records them."""
    return {"device": device.partition(":")[0], "data": None if data is None else os.path.abspath(data)}


def is_report(content: Any, command: str, folder: Path) -> bool:
    """True for a report of the command, False if no command wrote it; InputError for one of another command."""
    kind = kind_of(content, kinds())
    if kind is not None and kind.command != command:
        raise InputError(f"{folder} contains a run of {kind.command}; {ELSEWHERE}")
    return kind is not None


def check_other_reports(folder: Path, command: str) -> None:
    """InputError if the folder contains a report of another command."""
    for kind in kinds():
        try:
            content = read_json(path) if (path := folder / kind.file).is_file() else None
        except InputError:  # it is not ours
            continue
        is_report(content, command, folder)


def complete_removal(folder: Path) -> bool:
    """Remove what is left of a run whose removal was begun; the record of the names stays. False if there is none.

    Raises:
        InputError: the record is damaged, or something cannot be removed.
    """
    for name in (names := _names_to_remove(folder)) or ():
        path = folder / name
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            where, reason = error.filename or path, error.strerror or error
            raise InputError(f"cannot remove {where}: {reason}; make it writable, and repeat the command") from None
    return names is not None


def end_removal(folder: Path) -> None:
    """Complete a removal that was begun in a folder, if there is one."""
    if complete_removal(folder):
        (folder / REMOVING).unlink()


def _names_to_remove(folder: Path) -> list[str] | None:
    """The names in a folder of a run that is being removed; None if there is none."""
    path, remedy = folder / REMOVING, f"remove this file, or {ELSEWHERE}"
    if not path.exists():
        return None
    names: list[str] = seals.read_json(path, remedy).get("names", [])
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise seals.Damaged(path, f"{name!r} is not the name of something in the folder", remedy)
    return names


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run that records its settings when it begins, and writes `results.json` last.

    The same command continues the run. A finished run is kept unless it is to run again; an unfinished run is never
    replaced. To replace a run, the names that go with it are written to `REMOVING` first, so that the next command
    completes a removal that was interrupted, and removes nothing else.

    Attributes:
        command: the command, as users call it.
        asked: its settings.
        file: the name of the file that holds them, with the functions that `read` and `write` it.
        outputs: a regular expression of the names that a run makes until it is finished.
        recorded: the names of further files of a finished run, from its results.
        stray: finds something among the outputs that no run of the command wrote.
        differing: the settings that make an earlier run another one, whose names have dots where tables are nested.
        is_complete: tells whether the results have all that is asked for.
    """

    folder: Path
    command: str
    asked: Settings
    file: str
    outputs: str
    recorded: Callable[[Settings], Iterable[str]] = lambda content: ()
    stray: Callable[[], Path | None] = lambda: None
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
            InputError: the folder contains another run, unless it is finished and `again` replaces it; or a run of
                another command, or something else; or a file in it is damaged.
        """
        return self._look(again)[1]

    def continued(self, again: bool = False) -> Settings | None:
        """The settings of the run in the folder that the command continues if they fit; None if a new run begins."""
        report = self._report()
        if _names_to_remove(self.folder) is not None or (again and report is not None):
            return None
        return self._earlier()

    def begin(self, again: bool = False) -> bool:
        """Record the settings of a run that begins or continues; with `again`, a finished run is removed first.

        Returns:
            True if the run is new: nothing in the folder is of an earlier one.

        Raises:
            InputError: as `finished`, or something cannot be removed.
        """
        new, _ = self._look(again)
        if new and self.results.exists() and _names_to_remove(self.folder) is None:
            self._begin_removal(self._recorded())
        complete_removal(self.folder)
        self.results.unlink(missing_ok=True)  # a longer run is not finished, and `again` must not remove it
        files.write(self.folder / self.file, self.write(self.asked))
        (self.folder / REMOVING).unlink(missing_ok=True)  # last: until then, the folder is known to be that of a run
        return new

    def clear(self) -> None:
        """Remove a run that has begun and has no results yet."""
        self._begin_removal()
        end_removal(self.folder)

    def _begin_removal(self, recorded: Iterable[str] = ()) -> None:
        """Write down what is removed: what marks the run as finished first, and what tells whose it is last."""
        outputs = {path.name: None for path in self._outputs() if path.name != self.file}
        names = [self.results.name, *outputs, *recorded, self.file]
        files.write(self.folder / REMOVING, seals.sealed_json({"names": names}))

    def _look(self, again: bool) -> tuple[bool, dict[str, Any] | None]:
        """True if a new run begins here; and the results of this run if it is finished."""
        report = self._report()
        if _names_to_remove(self.folder) is not None or (earlier := self._earlier()) is None:
            return True, None
        if again and report is not None:
            self._check_removable(earlier)
            return True, None
        if differing := self.differing(_flat(earlier), _flat(json.loads(json.dumps(self.asked)))):
            run = "another run" if report is not None else "another run, unfinished,"
            raise refusal(self.folder, run, differing, replaceable=report is not None)
        try:
            return False, report if report is not None and self.is_complete(report) else None
        except (KeyError, TypeError):
            raise self._damaged() from None

    def _report(self) -> dict[str, Any] | None:
        """The results in the folder, of any settings; None if there are none."""
        if not self.results.exists():
            check_other_reports(self.folder, self.command)
            return None
        content = seals.parsed(self.results, REMOVE)
        if not is_report(content, self.command, self.folder):
            raise self._damaged()
        return content

    def _damaged(self) -> seals.Damaged:
        return seals.Damaged(self.results, f"it has no results of {self.command}", REMOVE)

    def _earlier(self) -> Settings | None:
        """The settings of the run in the folder; None if there is none, or one that has not done anything yet."""
        path, tops = self.folder / self.file, self._outputs()
        unrecorded = {name: self.asked[name] for name in UNRECORDED if name in self.asked}
        if not path.exists():
            if not files.empty_but_for(self.folder, RUNNING):
                raise InputError(f"{self.folder} is not empty and contains no run of {self.command}; {ELSEWHERE}")
            return None
        earlier, below = {**unrecorded, **self.read(path)}, (each for top in tops for each in (top, *top.rglob("*")))
        if any(each.is_file() and not files.is_part(each) for each in below) or not files.empty_but_for(
            self.folder, [*RUNNING, self.file, *(top.name for top in tops)]
        ):
            return earlier
        self._check_record(earlier)
        return None

    def _check_removable(self, earlier: Settings) -> None:
        """InputError if something that is to be removed is not of a run of the command."""
        self._check_record(earlier)
        self._recorded()
        if (stray := self.stray()) is not None:
            raise InputError(
                f"{stray.parent} contains {stray.name}, which {self.command} did not write, so --again does not remove "
                f"it; move {stray.name}, or {ELSEWHERE}"
            )

    def _check_record(self, earlier: Settings) -> None:
        """InputError if the file with the settings is not the command's."""
        if missing := [name for name in self.asked if name not in earlier]:
            path = self.folder / self.file
            raise InputError(f"{path} is not of {self.command}: it has no {missing[0]!r}; move it, or {ELSEWHERE}")

    def _recorded(self) -> list[str]:
        """The further files that the results of the folder name: in the folder itself, and there."""
        try:
            names = [name for name in self.recorded(seals.parsed(self.results, REMOVE)) if Path(name).name == name]
        except (AttributeError, KeyError, TypeError):
            raise self._damaged() from None
        return [name for name in names if (self.folder / name).is_file()]

    def _outputs(self) -> list[Path]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(path for path in paths if re.fullmatch(self.outputs, path.name))


def _flat(settings: Settings) -> dict[str, Any]:
    """Settings in nested tables, by their names with dots."""
    named: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            value = {str(number): each for number, each in enumerate(value)}
        named |= {f"{name}.{n}": v for n, v in _flat(value).items()} if isinstance(value, dict) else {name: value}
    return named


def _shown(value: Any) -> str:
    """A setting in a message: numbers as a command line has them, and texts in quotes, cut where they are long."""
    if value is None or value in ("", []):
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if numbers := _numbers(value):
        return numbers
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    if len(text) > LONGEST:  # paths differ at their ends
        text = f"…{text[1 - LONGEST :]}" if os.path.isabs(text) else f"{text[: LONGEST - 1]}…"
    return f"'{text}'"


def _numbers(value: Any) -> str:
    """A number, or a list of them, as a command line has them; empty if it is something else."""
    each = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int | float) for number in each):
        return ""
    return ",".join(str(number).removesuffix(".0") for number in each)
