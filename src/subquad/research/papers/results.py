"""The results of an experiment as plain data: tables, plots and comments on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Value = str | float | int | None  # of a table; None: not measured


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under columns, with what a reader must know of them. The first column names the rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Series of points (x, y), joined or not; `bands` has (low, high) at the points of some series."""

    file: str  # the name of the PNG, without its ending
    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    bands: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the text next to each point
    levels: Mapping[str, float] = field(default_factory=dict)  # horizontal lines: baselines, published figures
    joined: bool = True
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Values by row and column, each written into its square."""

    file: str
    title: str
    x: str
    y: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]
    low: float = 0.0
    high: float = 1.0
    format: str = ".2f"


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A group of bars for each row, one for each column."""

    file: str
    title: str
    y: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    levels: Mapping[str, float] = field(default_factory=dict)


Plot = Lines | HeatMap | Bars


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results: a sentence or two, tables of our and the published figures, plots."""

    summary: str
    tables: Sequence[Table]
    plots: Sequence[Plot] = ()


@dataclass(frozen=True, kw_only=True)
class Header:
    """The information that a reader needs to judge the results, or to run them again."""

    name: str
    title: str
    source: str  # paper and table or figure
    scale: str
    command: str
    settings: Mapping[str, object]
    deviations: Sequence[str]
    machine: Mapping[str, object]
    seconds: float  # the time of all cells together
