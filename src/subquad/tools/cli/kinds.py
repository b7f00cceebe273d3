"""The kinds of records that commands leave in a folder: the file that holds one, its page, its table in a terminal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from subquad.core.errors import InputError
from subquad.core.reading import is_folder, read_json
from subquad.tools.runs.records import from_plain

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of results: `holds` recognises the content of its file, and `plain` takes the part of it that is shown.

    `record` makes of this part the record that `table` takes. `beside` are names of further files that the command
    writes, and that are also written in other ways.
    """

    command: str
    file: str
    page: str
    holds: Callable[[Record], bool]
    table: Callable[[Any], RenderableType]
    record: Callable[[Record], Any] = lambda content: content
    plain: Callable[[Record], Record] = lambda content: content
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class FinishedReport:
    """A record in a folder."""

    kind: Kind
    path: Path
    record: Any

    @property
    def page(self) -> Path | None:
        """The page for a browser; None where it is gone."""
        path = self.path.with_name(self.kind.page)
        return path if path.is_file() else None

    def table(self) -> RenderableType:
        """The table that the command printed."""
        return self.kind.table(self.record)


def table_in(module: str, function: str = "rich_table") -> Callable[[Any], RenderableType]:
    """A function of a module, which is loaded on use."""
    return lambda record: getattr(import_module(module), function)(record)


def record_in(module: str, name: str) -> Callable[[Record], Any]:
    """Reads content as a record of a module, which is loaded on use."""
    return lambda content: from_plain(getattr(import_module(module), name), content)


def names_itself(kind: str) -> Callable[[Record], bool]:
    """Recognises content by its entry "kind"."""
    return lambda content: content.get("kind") == kind


def has(*names: str) -> Callable[[Record], bool]:
    """Recognises content without an entry "kind" by the entries that it has."""
    return lambda content: "kind" not in content and all(name in content for name in names)


def kind_of(content: Any, kinds: Sequence[Kind]) -> Kind | None:
    """The kind of a file's content; None where no command wrote it."""
    return next((kind for kind in kinds if isinstance(content, dict) and kind.holds(content)), None)


def read_finished(folder: Path, kinds: Sequence[Kind]) -> FinishedReport:
    """The record in a folder or a file.

    Raises:
        InputError: there is none, or there are several; the message has the remedy.
    """
    paths = [folder / name for name in dict.fromkeys(kind.file for kind in kinds)] if is_folder(folder) else [folder]
    contents = {path: read_json(path) for path in paths if path.is_file()}
    runs = [(kind, path) for path, content in contents.items() if (kind := kind_of(content, kinds)) is not None]
    if len(runs) > 1:
        listed = " and ".join(f"{path.name} ({kind.command})" for kind, path in runs)
        raise InputError(f"{folder} contains several runs, {listed}; give the file of one of them")
    for kind, path in runs:
        return FinishedReport(kind, path, record_of(kind, path, contents[path]))
    raise InputError(f"{folder} contains no finished run of subquad{_why(folder)}")


def record_of(kind: Kind, path: Path, content: Record) -> Any:
    """The record of a file's content; InputError where it has no such parts as the table shows."""
    try:
        record = kind.record(kind.plain(content))
        Console(file=StringIO()).print(kind.table(record))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: it has no table to show ({type(error).__name__}: {error})") from error
    return record


def _why(folder: Path) -> str:
    """A hint for a folder without results: what may have been meant, or what has to be done first."""
    if (folder / "plan.json").is_file():
        return "; it contains a plan alone, which sq.load_plan reads"
    begun = (".progress/subquad.txt", "settings.toml", "run.json", "search.json")
    if any((folder / name).is_file() for name in begun):
        return "; a run was interrupted there, and the same command resumes it"
    return ""
