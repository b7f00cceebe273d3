"""Shared code of the tasks of `tasks.py`: cells, kept once they are measured; intervals by the bootstrap; tables.

A cell is what one row of a table gives at one length: a list of numbers for each query, text, passage or prompt.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import sheet
from numpy.typing import NDArray

import subquad
from subquad.core.errors import InputError, as_input_error
from subquad.methods import parse_method
from subquad.tools.models.compare_rows import row_of
from subquad.tools.models.pretrained import Pretrained, running
from subquad.tools.runs import machine
from subquad.tools.runs.cache import run_cache
from subquad.tools.runs.jobs import JobKind, Progress

Cell = list[list[float]]
Cells = Mapping[str, Cell]  # by the names of the rows

EXACT = "exact"
FIRST, MEAN, BEST = "first 512 tokens", "mean of chunks", "best chunk"
CHUNKED = (FIRST, MEAN, BEST)
DIFFERENCE = "difference"
RESAMPLES, CONFIDENCE = 4000, 0.95
NOT_MEASURED = "not measured"

CELL: JobKind[Cell] = JobKind("cell", Cell)


class TaskAtLength(Protocol):
    """A task with its inputs of one length."""

    @property
    def name(self) -> str:
        """Its name on the command line."""

    @property
    def pretrained(self) -> Pretrained:
        """The model with its own positions."""

    @property
    def length(self) -> int:
        """Tokens of an input."""

    @property
    def rows(self) -> Sequence[str]:
        """The rows of its table, exact attention first."""

    def inputs(self) -> object:
        """Plain data that all its cells depend on, beside the model."""

    def measure(self, row: str, progress: Progress) -> Cell:
        """One row."""

    def about(self) -> str:
        """Describe the inputs and the figures of the table, one sentence a line."""

    def figures(self, cell: Cell, exact: Cell) -> Mapping[str, "Figures"]:
        """A row's figures, by the title of the table that has them, and its differences to exact attention."""


class Interval(NamedTuple):
    """A mean with its confidence interval."""

    mean: float
    low: float
    high: float

    def text(self, write: Callable[[float], str]) -> str:
        """The cell of a table: the mean, and the ends in brackets."""
        return f"{write(self.mean)} [{write(self.low)}, {write(self.high)}]"


Figures = Mapping[str, Interval]  # of a row, by column
Tables = Mapping[str, Mapping[str, Figures | None]]  # by title and row; None: not measured


def interval(values: Sequence[float], groups: int | None = None, seed: int = 0) -> Interval:
    """The mean of some values and its percentile interval over bootstrap resamples; one seed, the same resamples.

    With `groups`, the values are that many groups of equal size in their order, which are resampled as wholes.
    """
    means = np.asarray(values, dtype=np.float64).reshape(groups or len(values), -1).mean(1)
    resampled = _resamples(len(means), seed) @ means
    low, high = np.quantile(resampled, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(means.mean()), float(low), float(high))


@cache
def _resamples(count: int, seed: int) -> NDArray[np.float64]:
    """The share of each of `count` values in each resample."""
    shares: NDArray[np.float64] = np.random.default_rng(seed).multinomial(count, [1 / count] * count, RESAMPLES) / count
    return shares


def difference(values: Sequence[float], exact: Sequence[float], groups: int | None = None) -> Interval:
    """The paired difference to exact attention on the same items."""
    return interval(np.subtract(values, exact).tolist(), groups)


def compared(
    name: str, values: Sequence[float], exact: Sequence[float], groups: int | None = None
) -> dict[str, Interval]:
    """The column of some values, and that of their differences to exact attention."""
    return {name: interval(values, groups), f"{name}, {DIFFERENCE}": difference(values, exact, groups)}


def percent(share: float) -> str:
    """A share in percent."""
    return f"{100 * share:.1f} %"


def points(share: float) -> str:
    """A difference of shares, in percent with its sign."""
    rounded = round(100 * share, 1) + 0.0
    return "0.0 %" if rounded == 0 else f"{rounded:+.1f} %".replace("-", "−")


def signed(number: float, digits: int = 4) -> str:
    """A number with its sign."""
    rounded = round(number, digits) + 0.0
    return f"{0:.{digits}f}" if rounded == 0 else f"{rounded:+.{digits}f}".replace("-", "−")


WRITE: dict[str, Callable[[float], str]] = {  # by column; the others have shares and differences of shares
    "perplexity": "{:.2f}".format,
    f"{DIFFERENCE} in nats per token": signed,
    "nats per answer token": lambda number: f"{number:.2f}".replace("-", "−"),
    f"nats per answer token, {DIFFERENCE}": lambda number: signed(number, 2),
}


def written(column: str, figures: Figures | None) -> str:
    """The cell of a row in a column."""
    if figures is None:
        return NOT_MEASURED
    return Interval(*figures[column]).text(WRITE.get(column, points if DIFFERENCE in column else percent))


def tables_of(task: TaskAtLength, cells: Cells) -> Tables:
    """The figures of all rows."""
    figures = {row: task.figures(cells[row], cells[EXACT]) if row in cells else {} for row in task.rows}
    return {title: {row: figures[row].get(title) for row in task.rows} for title in figures[EXACT]}


def markdown(tables: Tables) -> str:
    """Each row with intervals, and its paired differences to exact attention."""
    parts = []
    for title, rows in tables.items():
        columns = list(rows[EXACT] or {})
        head = ["attention", *(DIFFERENCE if each.endswith(f", {DIFFERENCE}") else each for each in columns)]
        lines = [
            [named(row), *("–" if row == EXACT and DIFFERENCE in each else written(each, figures) for each in columns)]
            for row, figures in rows.items()
        ]
        parts += [*([f"{title}:"] if title else []), sheet.table(head, lines)]
    return "\n\n".join(parts)


def named(row: str) -> str:
    """A row's name in a table."""
    return row if row in (EXACT, *CHUNKED) else f"`{row}`"


@contextmanager
def attention(pretrained: Pretrained, row: str) -> Iterator[None]:
    """Run the model with the attention of a row, for a while.

    Raises:
        InputError: no method has this name, it cannot run in this model, or it has parameters to fit first.
    """
    if row == EXACT:
        yield
        return
    with running(pretrained.model, swap_of(pretrained, row)):
        yield


def swap_of(pretrained: Pretrained, name: str) -> object:
    """The argument of `hf.swap` for a method; InputError as for `attention`."""
    with as_input_error():
        method = parse_method(name)
    if method.traits.learned:
        raise InputError(f"{name} has parameters to fit first, which no task does; leave it out of --methods")
    row = row_of(pretrained, method)
    if not row.layers:
        raise InputError(f"{name} cannot run in {pretrained.name}: {row.reason}; leave it out of --methods")
    return row.swap


def measured(
    task: TaskAtLength, folder: Path, progress: Callable[[str], Progress], late: Callable[[], bool]
) -> dict[str, Cell]:
    """The cells of a task: those of an earlier run with the same inputs, model and code, and else new ones.

    Args:
        folder: where each cell is kept as soon as it is measured.
        progress: makes the progress of a row, by its name.
        late: whether it is too late to begin another cell; such a cell is left out.
    """
    kept = run_cache(folder, [task.name, task.pretrained.identity(), task.inputs(), code(), machine.hardware()])
    cells = {}
    for row in task.rows:
        job = CELL.job(row, run=partial(_measure, task, row, progress))
        if kept.has(job.key) or not late():
            cells[row] = kept.get(job)
    return cells


def _measure(task: TaskAtLength, row: str, progress: Callable[[str], Progress]) -> Cell:
    return task.measure(row, progress(row))


@cache
def code() -> str:
    """A digest of the library's code, so that cells of other code are not taken for its own."""
    package = Path(subquad.__file__).parent
    files = sorted(path for suffix in ("*.py", "*.so") for path in package.rglob(suffix))
    return hashlib.sha256(json.dumps([_digest(path) for path in files]).encode()).hexdigest()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
