"""Write an experiment's results: results.json, results.md and its plots."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from subquad.research.papers.plots import plots
from subquad.research.papers.results import Header, Results, Table, Value
from subquad.tools.report.markup import rows_of
from subquad.tools.report.report_files import as_json, write_files
from subquad.tools.report.terminal import plain_table


def write_results(header: Header, results: Results, cells: dict[str, Any], folder: Path) -> list[Path]:
    """Write the files into a folder, made if need be; return their paths. All are made before the first is written."""
    drawn = plots(header.name, results)
    page, record = markdown(header, results, list(drawn)).encode(), as_json(as_record(header, results, cells))
    # results.json marks the run as finished, so it comes last.
    return write_files({"results.md": page, **drawn, "results.json": record}, folder)


def markdown(header: Header, results: Results, images: list[str]) -> str:
    """The results as one page."""
    parts = [f"# {header.title}", f"{header.source}. Scale `{header.scale}`: `{header.command}`.", *_warning(header)]
    parts.append(results.summary)
    for table in results.tables:
        parts += [f"## {table.title}", table_of(table)]
        parts += [table.note] if table.note else []
    parts += [f"![{image.removesuffix('.png')}]({image})" for image in images]
    parts += ["## Settings", "\n".join(f"- {setting(name, value)}" for name, value in header.settings.items())]
    if header.deviations:
        parts += ["## Deviations from the paper", "\n".join(f"- {line}" for line in header.deviations)]
    machine = ", ".join(f"{words(name)} {value}" for name, value in header.machine.items())
    parts += ["## Machine and duration", f"{machine}; {header.seconds:,.0f} seconds for all cells."]
    return "\n\n".join(parts) + "\n"


def as_record(header: Header, results: Results, cells: dict[str, Any]) -> dict[str, Any]:
    """The content of results.json."""
    return {"experiment": asdict(header), "results": asdict(results), "cells": cells}


def rich_record(record: Mapping[str, Any]) -> Group:
    """The content of results.json as a terminal shows it."""
    results = record["results"]
    tables = [Table(**table) for table in results["tables"]]
    return rich_results(Header(**record["experiment"]), Results(summary=results["summary"], tables=tables))


def rich_results(header: Header, results: Results) -> Group:
    """The tables, as a terminal shows them."""
    parts: list[Any] = [Text(f"{header.title} ({header.source})", style="bold")]
    parts += [Text(line) for line in (*_warning(header), results.summary)]
    for table in results.tables:
        rich = plain_table(table.columns, (map(shown, row) for row in table.rows))
        parts += [Text(), Text(table.title, style="italic"), rich] + ([Text(table.note)] if table.note else [])
    return Group(*parts)


def _warning(header: Header) -> list[str]:
    return ["A smoke run shows that the experiment runs; its figures mean nothing."] if header.scale == "smoke" else []


def table_of(table: Table) -> str:
    """A table as Markdown. A bar or a new line inside a cell would end it."""
    rows = (table.columns, *table.rows)
    return rows_of([[" ".join(shown(value).split()).replace("|", "\\|") for value in row] for row in rows])


def shown(value: Value) -> str:
    """A value as tables show it."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
    return str(value)


def setting(name: str, value: object) -> str:
    """A setting and its value as readable text."""
    if name == "model" and value == "":
        return "model: the encoder of the extra `demo`"
    return f"{words(name)}: {readable(value)}"


def words(name: str) -> str:
    """A name of the code, with spaces."""
    return name.replace("_", " ")


def readable(value: object) -> str:
    """The value of a setting as text: no braces and quotes, thousands with commas, methods as inline code."""
    if isinstance(value, Mapping):
        nested = any(isinstance(part, Mapping) for part in value.values())
        parts = [f"{words(str(name))} {_inside(part)}" for name, part in value.items()]
        return ("; " if nested else ", ").join(parts) or "none"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        parts = [_inside(part) for part in value]
        return ("; " if any(", " in part for part in parts) else ", ").join(parts) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    text = "none" if value is None or value == "" else str(value)
    return f"`{text}`" if _is_method(text) else text


def _inside(value: object) -> str:
    """A value inside of another."""
    is_several = isinstance(value, Mapping | list | tuple) and not hasattr(value, "_fields")
    return f"({readable(value)})" if is_several else readable(value)


def _is_method(text: str) -> bool:
    return "=" in text and " " not in text
