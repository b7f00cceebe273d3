"""Read the results of a run."""

from collections.abc import Callable, Sequence

from subquad.tools.needle.schema import NeedleCell, NeedleMethod, NeedleReport


def cells_of(method: NeedleMethod, length: int, task: str | None = None) -> list[NeedleCell]:
    """The cells of a method at a length, of one task or of all."""
    return [cell for cell in method.cells if cell.length == length and task in (None, cell.task)]


def mean_over(cells: Sequence[NeedleCell], figure: Callable[[NeedleCell], float | None]) -> float | None:
    """The mean of a figure over cells; None where there are none, or one of them has none."""
    values = [figure(cell) for cell in cells]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def over_tasks(
    report: NeedleReport, method: NeedleMethod, length: int, figure: Callable[[NeedleCell], float | None]
) -> float | None:
    """The mean of the tasks, each of which is the mean over its depths; None where one of them has none."""
    means = [mean_over(cells_of(method, length, task), figure) for task in report.settings["tasks"]]
    known = [mean for mean in means if mean is not None]
    return sum(known) / len(known) if known and len(known) == len(means) else None


def shown(method: NeedleMethod, cell: NeedleCell) -> float | None:
    """The log-likelihood of exact attention; of any other method, the difference to it."""
    return cell.log_likelihood if method.role == "exact" else cell.difference
