"""Text to read: the standard library's documentation, files, folders, columns of tables."""

import ast
import csv
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from subquad.errors import InputError

TABLES = (".jsonl", ".csv", ".tsv")
SUFFIXES = (".txt", ".md", ".rst", *TABLES)
STANDARD_LIBRARY = "the documentation of Python's standard library (docstrings, gathered from this installation)"


def read_documents(paths: Sequence[Path], column: str = "text") -> list[str]:
    """The documents in files and folders: a text file is one, a row of .jsonl, .csv or .tsv is one.

    Raises:
        InputError: a path is missing, empty or binary, or a table lacks the column; named.
    """
    documents = [document for path in paths for document in _read(path, column)]
    if not documents:
        raise InputError(f"no text in {', '.join(map(str, paths))}")
    return documents


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


def _read(path: Path, column: str) -> list[str]:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not files:
            raise InputError(f"no text in the folder {path}: it holds no {', '.join(SUFFIXES)} file")
        return [document for file in files for document in _read(file, column)]
    if path.suffix.lower() in TABLES:
        documents = [field_of(path, n, row, column) for n, row in read_rows(path)]
    else:
        documents = [read_text(path)]
    return [document for document in documents if document.strip()]


def read_text(path: Path) -> str:
    """A text file's content; InputError when it is missing, empty, or no UTF-8 text."""
    if not path.exists():
        raise InputError(f"no file or folder at {path}")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(f"{path} is not a text file (UTF-8); give text, .jsonl, .csv or .tsv")
    if not text.strip():
        raise InputError(f"{path} is empty")
    return text


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number, row) of a table of any of the `TABLES`.

    Raises:
        InputError: as `read_text`, or a line that is no JSON object.
    """
    text = read_text(path)
    if path.suffix.lower() != ".jsonl":
        return table_rows(path, text)
    lines = ((n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip())
    return ((n, json_line(path, n, line)) for n, line in lines)


def json_line(path: Path, number: int, line: str) -> dict[str, object]:
    """One row of a .jsonl file."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number}: not JSON ({error.msg})") from None
    if not isinstance(row, dict):
        raise InputError(f"{path}, line {number}: expected an object with named fields, got {type(row).__name__}")
    return row


def table_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number, row) of a .csv or .tsv file with a header; InputError for a row with more fields than that."""
    reader = csv.DictReader(text.splitlines(keepends=True), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    for row in reader:
        found = dict(row)
        beyond = found.pop(reader.restkey, [])
        if beyond:
            raise InputError(
                f"{path}, line {reader.line_num}: {len(found) + len(beyond)} fields, but the header has {len(found)}; "
                "a text with the delimiter in it must stand in quotes"
            )
        yield reader.line_num, found


def field_of(path: Path, number: int, row: dict[str, object], column: str) -> str:
    """What a row has in a column, as text; InputError where it has no such column."""
    if column not in row:
        raise InputError(f"{path}, line {number}: no column {column!r}; it has {', '.join(map(str, row))}")
    value = row[column]
    return "" if value is None else str(value)
