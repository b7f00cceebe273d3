"""Rows of tables as plain data: CSV, TSV and lines of JSON.

A line ends at a line feed (in CSV also at a carriage return) and nowhere else: texts hold U+2028, U+0085 and form
feeds, at which `str.splitlines` would cut them. A line that is not a row is an InputError that names file and line.
"""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from subquad.core.errors import InputError
from subquad.core.reading import parse_json

TAB = "\t"


def json_line(path: Path, number: int, line: str) -> dict[str, object]:
    """One row of a .jsonl file."""
    try:
        row = parse_json(line)
        if "\\ud" in line.lower():  # an escaped half of a character, alone or with its other half
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(f"{path}, line {number}: half of a character (a lone surrogate) is not text") from None
    except ValueError as error:
        raise InputError(f"{path}, line {number}: not JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(row, dict):
        raise InputError(f"{path}, line {number}: expected an object with named fields, got {type(row).__name__}")
    return row


def table_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, object]]]:
    """(line number, row) of a .csv or .tsv file with a header; a row has None where it ends before the header does."""
    rows = fields_of(path, text, delimiter=TAB if path.suffix.lower() == ".tsv" else ",")
    _, header = next(rows, (0, []))
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{path} has two columns {twice!r}; give each a name of its own")
    for line, fields in rows:
        if len(fields) > len(header):
            raise InputError(
                f"{path}, line {line}: {len(fields)} fields, but the header has {len(header)}; a text with the "
                "delimiter in it must be in quotes"
            )
        yield line, dict.fromkeys(header, None) | dict(zip(header, fields, strict=False))


def fields_of(path: Path, text: str, **dialect: Any) -> Iterator[tuple[int, list[str]]]:
    """(line number, fields) of each row of a table that is not blank, however long its fields are."""
    before = csv.field_size_limit(max(len(text), 1))  # of all readers in this process
    try:
        reader = csv.reader(io.StringIO(text, newline=""), **dialect)
        rows = [(reader.line_num, fields) for fields in reader if fields]
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: not a table ({error})") from None
    finally:
        csv.field_size_limit(before)
    return iter(rows)
