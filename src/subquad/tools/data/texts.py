"""Text to read: the standard library's documentation, files, folders, columns of tables.

What is missing, empty, binary or lacks the column is an InputError that names it; empty and binary files of a folder
are skipped with a warning.
"""

import ast
import codecs
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from subquad.core.errors import InputError
from subquad.core.messages import note
from subquad.core.reading import chunks, files_in, is_folder
from subquad.core.spelling import instead
from subquad.tools.data.tables import json_line, table_rows
from subquad.tools.runs.alone import LOCK

TABLES = (".jsonl", ".csv", ".tsv")
SUFFIXES = (".txt", ".md", ".rst", *TABLES)
FEW = 3  # names of files in a message
UTF_8 = "convert to UTF-8, for example with iconv -f latin1 -t utf-8"
STANDARD_LIBRARY = "the documentation of Python's standard library (docstrings, gathered from this installation)"


logger = logging.getLogger(__name__)


def read_documents(paths: Sequence[Path], column: str = "text") -> list[str]:
    """The documents in files and folders: a text file is one, a row of .jsonl, .csv or .tsv is one.

    Files of a folder that are empty or not text in UTF-8 are skipped, with a warning that names them. A file that
    several of the paths lead to is read once: its passages could be both fitted on and held out otherwise.
    """
    known: set[Path] = set()
    documents = [document for path in paths for document in _read(path, column, known)]
    if not documents:
        raise InputError(f"no text in {', '.join(map(str, paths))}")
    return documents


class NoText(InputError):
    """A file is empty, or is not text in UTF-8."""


class NoColumn(InputError):
    """A table lacks the column that was asked for."""


def report_folders(progress: Any, paths: Sequence[Path]) -> None:
    """Tell `progress` which files of the folders among some paths are read, and which are not."""
    for line in folder_lines(paths):
        note(progress, line)


def folder_lines(paths: Sequence[Path]) -> list[str]:
    """For each folder among the paths, a line about which of its files `read_documents` reads and which not."""
    lines = []
    for folder in filter(is_folder, paths):
        read = [path for path in _texts_in(folder) if _is_text(path)]  # `read_documents` names the others
        others = (path for path in files_in(folder, ("",)) if not path.name.lower().endswith(SUFFIXES))
        skipped = [path for path in others if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
        line = f"{folder}: {_counted(read, folder)} read"
        if skipped:
            line += f"; {_counted(skipped, folder)} skipped, because the name does not end in {', '.join(SUFFIXES)}"
        lines.append(line)
    return lines


def _texts_in(folder: Path) -> list[Path]:
    """The files with text in a folder; not the reports in a folder below it into which a run is writing."""
    running = {lock.parent for lock in files_in(folder, (LOCK,))} - {folder}
    return [path for path in files_in(folder, SUFFIXES) if running.isdisjoint(path.parents)]


def _is_text(path: Path) -> bool:
    try:
        read_text(path)
    except NoText:
        return False
    return True


def _counted(files: Sequence[Path], folder: Path) -> str:
    """The number of files, with the names of the first ones."""
    names = ", ".join(str(path.relative_to(folder)) for path in files[:FEW])
    more = ", …" if len(files) > FEW else ""
    which = f" ({names}{more})" if files else ""
    return f"{len(files):,} file{'' if len(files) == 1 else 's'}{which}"


def standard_library(least: int = 3000) -> list[str]:
    """The docstrings of each top-level module of the standard library that has `least` characters of them."""
    documents = []
    for name in sorted(sys.stdlib_module_names):
        spec = None if name.startswith("_") else importlib.util.find_spec(name)
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            document = "\n\n".join(_docstrings(Path(spec.origin)))
            if len(document) >= least:
                documents.append(document)
    return documents


def _docstrings(source: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8", errors="replace"))):
        if isinstance(node, kinds) and (doc := ast.get_docstring(node)):
            yield doc


def _read(path: Path, column: str, known: set[Path]) -> list[str]:
    """The documents of a path, without those of files that are known; adds its files to the known ones."""
    if is_folder(path):
        files = _texts_in(path)
        if not files:
            raise InputError(f"no text in the folder {path}: it contains no {', '.join(SUFFIXES)} file")
        return _read_folder(path, files, column, known)
    if path.resolve() in known:
        return []
    if path.suffix.lower() in TABLES:
        documents = [field_of(path, n, row, column) for n, row in read_rows(path)]
    else:
        documents = [read_text(path)]
    known.add(path.resolve())
    return [document for document in documents if document.strip()]


def _read_folder(folder: Path, files: Sequence[Path], column: str, known: set[Path]) -> list[str]:
    documents, skipped, reason = [], [], ""
    for file in files:
        try:
            documents += _read(file, column, known)
        except NoText as error:
            skipped.append(file)
            reason = reason or str(error)
    if len(skipped) == len(files):
        raise InputError(f"no text in the folder {folder}: {reason}")
    if skipped:
        _warn(f"{folder}: {_counted(skipped, folder)} skipped, because empty or not text in UTF-8; {UTF_8}")
    return documents


@cache
def _warn(line: str) -> None:
    """Log a warning, once in a process: a command reads its text several times."""
    logger.warning(line)


def read_text(path: Path) -> str:
    """A text file's content.

    Raises:
        NoText: it is empty, or not text in UTF-8.
        InputError: there is no such file, or it is not a regular one.
    """
    decoder, parts = codecs.getincrementaldecoder("utf-8-sig")(), []
    try:
        for part in chunks(path):
            parts.append(decoder.decode(part))
            if "\0" in parts[-1]:  # seen at once, however large the file is
                raise UnicodeError
        text = "".join([*parts, decoder.decode(b"", final=True)])
    except UnicodeError:
        raise NoText(
            f"{path} is not a text file in UTF-8; give text, .jsonl, .csv or .tsv in UTF-8, for example by iconv -f "
            "latin1 -t utf-8, or a folder, of which such files are skipped"
        ) from None
    if not text.strip():
        raise NoText(f"{path} is empty")
    return text


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number, row) of a table of any of the `TABLES`."""
    text = read_text(path)
    if path.suffix.lower() != ".jsonl":
        return table_rows(path, text)
    lines = ((n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip())
    return ((n, json_line(path, n, line)) for n, line in lines)


def field_of(path: Path, number: int, row: dict[str, object], column: str) -> str:
    """The text in a column of a row; InputError where it has no such column."""
    if column not in row:
        where = f"{path}, line {number}," if path.suffix.lower() == ".jsonl" else path
        raise NoColumn(f"{where} has no column {column!r}{instead(column, map(str, row), '', 'it has')}")
    value = row[column]
    if isinstance(value, dict | list):
        raise InputError(f"{path}, line {number}: {column!r} contains a {type(value).__name__}, not text")
    return "" if value is None else str(value)
