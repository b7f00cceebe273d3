"""Read the results of a run."""

from collections.abc import Callable, Sequence
from statistics import fmean

from subquad.tools.measure.intervals import interval_of_mean, interval_of_share
from subquad.tools.measure.noise import Interval
from subquad.tools.needle.schema import NeedleCell, NeedleMethod, NeedleReport

Groups = Sequence[Sequence[NeedleCell]]  # by task, and in it by depth


def cells_of(method: NeedleMethod, length: int, task: str) -> list[NeedleCell]:
    """The cells of a method at a length, of one task."""
    return [cell for cell in method.cells if (cell.length, cell.task) == (length, task)]


def by_task(report: NeedleReport, method: NeedleMethod, length: int) -> Groups:
    """The cells of a method at a length, task by task."""
    return [cells_of(method, length, task) for task in report.settings["tasks"]]


def mean_of(groups: Groups, figure: Callable[[NeedleCell], float | None]) -> float | None:
    """The mean over the tasks, each of which is the mean over its depths; None if it lacks a figure."""
    values = [[figure(cell) for cell in cells] for cells in groups]
    if not values or any(not each or None in each for each in values):
        return None
    return fmean(fmean(value for value in each if value is not None) for each in values)


def difference_interval(groups: Groups) -> Interval | None:
    """The interval of the mean difference; None of one sample, or if a cell lacks the differences of its samples.

    Prompts that differ in their depth alone have the same text, so the independent numbers are the means over the tasks
    and depths of each sample.
    """
    means = []
    for cells in groups:
        differences = [cell.differences for cell in cells if cell.differences is not None]
        if not cells or len(differences) < len(cells):
            return None
        means.append([fmean(of_sample) for of_sample in zip(*differences, strict=True)])
    return interval_of_mean([fmean(of_sample) for of_sample in zip(*means, strict=True)])


def right_interval(groups: Groups) -> Interval | None:
    """The interval of the share of right answers, with one independent trial per task and sample."""
    share = mean_of(groups, lambda cell: cell.right)
    return None if share is None else interval_of_share(share, sum(cells[0].samples for cells in groups))


def shown(method: NeedleMethod, cell: NeedleCell) -> float | None:
    """The log-likelihood of exact attention; of any other method, the difference to it."""
    return cell.log_likelihood if method.role == "exact" else cell.difference
