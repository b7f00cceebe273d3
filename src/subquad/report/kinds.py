"""The kinds of records that commands leave in a folder: the file that holds one, its page, its table in a terminal."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from subquad.data.files import is_folder, read_json
from subquad.errors import InputError

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """What one command leaves: `holds` recognises the content of its file, and `record` is the part that is shown."""

    command: str
    file: str
    page: str
    holds: Callable[[Record], bool]
    table: Callable[[Any], RenderableType]
    record: Callable[[Record], Any] = lambda content: content


@dataclass(frozen=True)
class Found:
    """A record that a folder holds."""

    kind: Kind
    path: Path
    record: Any

    @property
    def page(self) -> Path | None:
        """What a browser shows of it; None where it is gone."""
        path = self.path.with_name(self.kind.page)
        return path if path.is_file() else None

    def table(self) -> RenderableType:
        """What the command printed."""
        return self.kind.table(self.record)


def _table_in(module: str, function: str = "rich_table") -> Callable[[Any], RenderableType]:
    """A function of a module of this folder, which is loaded on use."""
    return lambda record: getattr(import_module(f"subquad.report.{module}"), function)(record)


# ---------------------------------------------------------------------- kinds


def _says(kind: str) -> Callable[[Record], bool]:
    return lambda content: content.get("kind") == kind


def _has(*names: str) -> Callable[[Record], bool]:
    return lambda content: "kind" not in content and all(name in content for name in names)


def _is_fitted(content: Record) -> bool:
    record = content.get("record")
    return isinstance(record, dict) and "history" in record


COMPARE = Kind("subquad compare", "report.json", "report.html", _has("recommendation", "methods"), _table_in("tables"))
PLAN = Kind("subquad plan", "report.json", "report.html", _says("plan"), _table_in("plan_tables"))
BENCH = Kind("subquad bench", "bench.json", "bench.md", _says("subquad bench"), _table_in("bench_tables"))
RANKS = Kind(
    "subquad bench on ranks",
    "ranks.json",
    "ranks.md",
    _says("subquad bench on ranks"),
    _table_in("ranks_sheet", "text"),
)
INSPECT = Kind("subquad inspect", "results.json", "results.md", _says("subquad inspect"), _table_in("inspect_tables"))
TRAIN = Kind(
    "subquad train", "results.json", "README.md", _has("task", "test"), _table_in("training_card", "rich_record")
)
REPRODUCE = Kind(
    "subquad reproduce",
    "results.json",
    "results.md",
    _has("experiment", "results"),
    _table_in("experiment_write", "rich_record"),
)
CALIBRATE = Kind(
    "subquad calibrate",
    "adapter.json",
    "README.md",
    _is_fitted,
    _table_in("adapter_card", "rich_record"),
    lambda content: content["record"],
)
TUNE = Kind("subquad tune", "results.json", "results.md", _says("subquad tune"), _table_in("tune_write"))
KINDS = (COMPARE, PLAN, BENCH, RANKS, INSPECT, TRAIN, REPRODUCE, CALIBRATE, TUNE)


def kind_of(content: Any) -> Kind | None:
    """The kind of a file's content; None where no command wrote it."""
    return next((kind for kind in KINDS if isinstance(content, dict) and kind.holds(content)), None)


def found_in(place: Path) -> Found:
    """The record that a folder, or a file, holds.

    Raises:
        InputError: there is none, or there are several; the message has the remedy.
    """
    paths = [place / name for name in dict.fromkeys(kind.file for kind in KINDS)] if is_folder(place) else [place]
    contents = {path: read_json(path) for path in paths if path.is_file()}
    found = [
        Found(kind, path, kind.record(content))
        for path, content in contents.items()
        if (kind := kind_of(content)) is not None
    ]
    if len(found) > 1:
        listed = " and ".join(f"{one.path.name} ({one.kind.command})" for one in found)
        raise InputError(f"{place} holds several runs, {listed}; give the file of one of them")
    if not found:
        raise InputError(f"{place} holds no finished run of subquad{_why(place)}")
    check(found[0].kind, found[0].path, found[0].record)
    return found[0]


def check(kind: Kind, path: Path, record: Any) -> None:
    """InputError where what was read from a file has no such parts as the table shows."""
    try:
        Console(file=StringIO()).print(kind.table(record))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: it has no table to show ({type(error).__name__}: {error})") from error


def _why(place: Path) -> str:
    """What may have been meant, or what has to be done first."""
    if (place / "plan.json").is_file():
        return "; it holds a plan alone, which sq.load_plan reads"
    if (place / ".progress" / "subquad.txt").is_file():
        return "; a run was interrupted there, and the same command resumes it"
    if (place / "settings.toml").is_file() or (place / "cells").is_dir():
        return "; a run was interrupted there, and the same command with --resume continues it"
    return ""
