"""Tables and facts of a report, which the terminal, Markdown and the page lay out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from subquad.tools.measure.noise import Noise
from subquad.tools.report.cells import Cell
from subquad.tools.report.terms import TERMS, term_of


def pieces(name: str) -> list[str]:
    """A method's name, cut where a line may break: after the colon and the commas."""
    return name.replace(":", ":\n").replace(",", ",\n").split("\n")


@dataclass(frozen=True)
class Column:
    """A column's head, the group that it belongs to (a length, mostly) and the term that explains it, if not its head.

    `about` explains a column that is not in a page's glossary.
    """

    head: str
    group: str = ""
    about: str = ""
    named: str = ""  # the term
    short: str = ""  # a short head for narrow tables; its words may be below each other

    @property
    def term(self) -> str:
        """The term in the glossary that explains the head; empty if there is none."""
        return "" if self.about else term_of(self.named or self.head)

    @property
    def meaning(self) -> str:
        """The description of the column; empty if its head suffices."""
        return self.about or TERMS.get(self.term, "")

    @property
    def title(self) -> str:
        """Group and head in one line."""
        return f"{self.group}: {self.head}" if self.group else self.head


@dataclass(frozen=True)
class Line:
    """A method's row. `marks` are "baseline", "recommended at 512 tokens", "3 of 6 layers"."""

    name: str
    cells: list[Cell]
    marks: list[str] = field(default_factory=list)

    @property
    def recommended(self) -> bool:
        """True if it is recommended, at any length."""
        return any(term_of(mark) == "recommended" for mark in self.marks)

    @property
    def pieces(self) -> list[str]:
        """The name, cut where a line may break."""
        return pieces(self.name)


@dataclass(frozen=True)
class ReportTable:
    """A table with a first column of names, methods by default, and one line for each."""

    columns: list[Column]
    lines: list[Line]
    first: str = "method"  # the first column's head

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Runs of neighbouring columns with one group: (group, how many)."""
        runs: list[tuple[str, int]] = []
        for column in self.columns:
            if runs and runs[-1][0] == column.group:
                runs[-1] = (column.group, runs[-1][1] + 1)
            else:
                runs.append((column.group, 1))
        return runs

    def only(self, wanted: Callable[[int], bool]) -> "ReportTable":
        """The table with the columns whose place `wanted` accepts."""
        kept = [i for i in range(len(self.columns)) if wanted(i)]
        lines = [Line(line.name, [line.cells[i] for i in kept], line.marks) for line in self.lines]
        return ReportTable([self.columns[i] for i in kept], lines, self.first)

    def dense(self) -> "ReportTable":
        """The table without columns in which nothing was measured."""
        return self.only(lambda i: any(line.cells[i].tone != "missing" for line in self.lines))


def sections_of(parts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(heading, [(name, value)]) of settings and the like as text, those that there are."""
    named = {title: [(key.replace("_", " "), text_of(key, part[key])) for key in part] for title, part in parts.items()}
    return [(title, pairs) for title, pairs in named.items() if pairs]


def text_of(key: str, value: Any) -> str:
    """Format a setting as text."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {text_of(k, v)}" for k, v in value.items()) or "none"
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], Mapping):
            return str(len(value))
        return ", ".join(text_of(key, item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool) and "seed" not in key:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() or 9999.5 <= abs(value) < math.inf else f"{value:.4g}"
    return str(value)


def warning(noise: Noise | None) -> str:
    """The sentences about the noise if the times are uncertain, which belong to the recommendation; otherwise empty."""
    return noise.says if noise is not None and noise.busy else ""
