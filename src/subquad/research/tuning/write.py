"""Write what `subquad tune` found: results.json, results.md, and plots of the trials."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Group
from rich.text import Text

from subquad.research.papers.plots import plots
from subquad.research.papers.results import Bars, Lines, Plot, Results, Table, Value
from subquad.research.papers.write import shown, table_of
from subquad.research.tuning.long_commands import in_lines
from subquad.research.tuning.schema import PLOT, TriedTrial, TuneReport, plot_by
from subquad.tools.report.markup import fenced, pairs_table
from subquad.tools.report.report_files import as_json, write_files
from subquad.tools.report.terminal import plain_table

NOTE = (
    "Validation examples choose the trial; test examples were not looked at. The best of many trials looks better than "
    "it is: judge it by the test figures of the command below."
)


def write_tune(report: TuneReport, folder: Path) -> list[Path]:
    """Write the files into a folder; return their paths."""
    drawn = plots("tune", Results(summary="", tables=[], plots=plots_of(report)))
    page = markdown(report, list(drawn))
    # results.json marks the search as finished, so it comes last.
    return write_files({"results.md": page.encode(), **drawn, "results.json": as_json(report)}, folder)


def markdown(report: TuneReport, images: Sequence[str]) -> str:
    """The report as one page."""
    failed = [f"- Trial {one.number}: {one.reason}" for one in report.trials if one.reason]
    parts = [f"# Search: {report.task['name']}", report.task["summary"], summary(report)]
    parts += ["## Trials, the best first", table_of(table(report)), NOTE]
    parts += ["## Train the best one", fenced(in_lines(report.best["command"]))]
    parts += [f"![{image.removesuffix('.png')}]({image})" for image in images]
    parts += ["## Failed trials", "\n".join(failed)] if failed else []
    parts += [
        "## Command and machine",
        fenced(in_lines(report.command)),
        pairs_table(list(report.machine.items())),
    ]
    return "\n\n".join(parts) + "\n"


def rich_table(report: TuneReport) -> Group:
    """The report of a search as a terminal shows it."""
    report_table = table(report)
    rows = ([shown(value) for value in row] for row in report_table.rows)
    best = report.best
    return Group(
        Text(summary(report), style="bold"),
        plain_table(report_table.columns, rows),
        Text(f"Train the best one, trial {best['number']}:"),
        Text(in_lines(best["command"])),
    )


def summary(report: TuneReport) -> str:
    """The number of trials in each state, and the best value, in words."""
    states = [trial.state for trial in report.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    best, way = report.trials[0], "highest" if report.task["greater"] else "lowest"
    value = f"{way} validation {report.task['metric']} is {shown(best.value)}"
    return f"{len(states)} trials ({counts}); the {value}."


def table(report: TuneReport) -> Table:
    """A row for each trial."""
    names = list(report.search)
    columns = ["trial", report.task["metric"], *names, "steps", "seconds", "state"]
    return Table(title="Trials", columns=columns, rows=[_row(one, names) for one in report.trials])


def _row(one: TriedTrial, names: Sequence[str]) -> list[Value]:
    values = (one.values[name] for name in names)
    return [f"{one.number}", one.value, *values, one.steps, one.seconds, one.state]


# ---------------------------------------------------------------------- plots


def plots_of(report: TuneReport) -> list[Plot]:
    """The value of each trial in their order, and against each setting."""
    trials = [trial for trial in report.trials if trial.value is not None]
    return [_history(report, trials), *(_against(report, name, trials) for name in report.search)]


def _history(report: TuneReport, trials: Sequence[TriedTrial]) -> Lines:
    return Lines(
        file=PLOT,
        title="the validation figure of each trial",
        x="trial",
        y=report.task["metric"],
        series=_series(trials, lambda one: float(one.number)),
        levels={"best": report.trials[0].value or 0.0},
        joined=False,
    )


def _against(report: TuneReport, name: str, trials: Sequence[TriedTrial]) -> Plot:
    metric, file = report.task["metric"], plot_by(name)
    title = f"the validation figure by {name}"
    values = list(dict.fromkeys(one.values[name] for one in trials))
    if all(map(_is_number, values)):
        series = _series(trials, lambda one: float(one.values[name]))
        log = report.search[name] == "log"
        return Lines(file=file, title=title, x=name, y=metric, series=series, joined=False, log_x=log)
    pick = max if report.task["greater"] else min
    best = [pick(one.value or 0.0 for one in trials if one.values[name] == value) for value in values]
    return Bars(file=file, title=title, y=metric, groups=values, series={"best trial": best})


def _series(trials: Sequence[TriedTrial], x: Callable[[TriedTrial], float]) -> dict[str, list[tuple[float, float]]]:
    return {
        state: points
        for state in ("finished", "pruned")
        if (points := sorted((x(one), one.value or 0.0) for one in trials if one.state == state))
    }


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
