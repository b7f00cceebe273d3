"""Run an experiment cell by cell, each kept as soon as it is done; then its tables and plots."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from subquad.core import files
from subquad.core.errors import InputError
from subquad.core.spelling import instead
from subquad.research.papers.base import SCALES, Cell, Context, Experiment, slug
from subquad.research.papers.overrides import as_options, changed
from subquad.research.papers.results import Header, Results
from subquad.tools.cli.folder import RunFolder, device_and_data
from subquad.tools.runs.cache import JobCache, stray_in
from subquad.tools.runs.executors import LOCAL, Executor
from subquad.tools.runs.jobs import Progress, silent
from subquad.tools.runs.machine import hardware, versions
from subquad.tools.runs.runner import run_jobs


def reproduce(
    experiment: Experiment,
    scale: str,
    out: Path,
    *,
    data: Path | None = None,
    device: str = "cpu",
    again: bool = False,
    changes: Mapping[str, Any] | None = None,
    progress: Progress = silent,
    executor: Executor = LOCAL,
) -> tuple[Header, Results, dict[str, Any]]:
    """Run all cells that `out` lacks, and report: what the experiment is, its results, the results of each cell.

    `changes` are settings in place of those of the scale; `executor` runs the cells. With `again`, a finished run in
    the folder is removed first.

    Raises:
        InputError: an unknown scale, missing data, or a folder that holds another run.
    """
    folder = run_folder(experiment, scale, out, changes or {}, data, device)
    executor.check_device(device)
    settings = changed(experiment.scales[scale], changes or {})
    _check_data(experiment, scale, settings, data)
    with _fitting(experiment.name, changes or {}):
        cells = list(experiment.cells(settings))
    if not cells:
        raise InputError(f"nothing to run: these settings of {experiment.name!r} leave no cell")
    _check_names(experiment.name, cells)
    folder.begin(again)
    records = _run_all(cells, experiment.name, out.absolute(), data, device, changes or {}, progress, executor)
    header = Header(
        name=experiment.name,
        title=experiment.title,
        source=experiment.source,
        scale=scale,
        command=shlex.join(["subquad", "reproduce", experiment.name, "--scale", scale, *as_options(changes or {})]),
        settings=asdict(settings),
        deviations=experiment.deviations,
        machine={
            **hardware(device),
            **versions(),
            **({"executor": executor.description} if executor.description else {}),
        },
        seconds=sum(cell["seconds"] for cell in records.values()),
    )
    with _fitting(experiment.name, changes or {}):
        results = experiment.results(settings, {key: cell["result"] for key, cell in records.items()})
    return header, results, records


def _run_all(
    cells: Sequence[Cell],
    name: str,
    out: Path,
    data: Path | None,
    device: str,
    changes: Mapping[str, Any],
    progress: Progress,
    executor: Executor,
) -> dict[str, Any]:
    """Run the cells and return what each one gave, and how long it took, by its key."""
    cache, data = cells_in(out), None if data is None else data.absolute()

    def job(cell: Cell) -> Cell:
        folder = cache.folder / slug(cell.key)
        files.make_folder(folder)
        context = Context(folder, data, device, silent, cell.after)
        return replace(cell, run=partial(run_cell, name, changes, cell, context))

    records = {cell.key: asdict(cached) for cell, cached in run_jobs(map(job, cells), cache, progress, executor)}
    return {cell.key: records[cell.key] for cell in cells}


def run_cell(name: str, changes: Mapping[str, Any], cell: Cell, context: Context, progress: Progress) -> dict[str, Any]:
    """Run a cell of the experiment of this name, in this process or in a worker, and return its result."""
    with _fitting(name, changes):
        return cell.run(replace(context, progress=progress))


@contextmanager
def _fitting(experiment: str, changes: Mapping[str, Any]) -> Iterator[None]:
    """Report failures with changed settings in one line: an experiment is only known to run with its own.

    An error with the settings of the scale is a mistake of ours, and goes on.
    """
    try:
        yield
    except (InputError, OSError):
        raise
    except Exception as error:
        if not changes:
            raise
        options = shlex.join(as_options(changes))
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{experiment!r} does not run with {options}: {reason}") from error


def run_folder(
    experiment: Experiment,
    scale: str,
    out: Path,
    changes: Mapping[str, Any],
    data: Path | None = None,
    device: str = "cpu",
) -> RunFolder:
    """The folder of a run. InputError for an unknown scale or setting."""
    if scale not in SCALES:
        raise InputError(f"no scale {scale!r}{instead(scale, SCALES, '')}")
    settings = asdict(changed(experiment.scales[scale], changes))
    where = device_and_data(device, data if experiment.needs or experiment.smoke_needs else None)
    asked = {"experiment": experiment.name, "scale": scale, "settings": settings, **where}
    return RunFolder(
        out,
        "subquad reproduce",
        asked,
        "run.json",
        r"cells|results\.md",
        recorded=lambda content: [f"{plot['file']}.png" for plot in content["results"]["plots"]],
        stray=lambda: stray_in(out / "cells", "cell"),
    )


def cells_in(out: Path) -> JobCache:
    """The results of the cells of the run in `out`, next to the folders in which they ran."""
    remedy = "; the same command then runs the cell again"
    return JobCache(out / "cells", key_field="cell", file_name=slug, remedy=remedy)


def _check_names(experiment: str, cells: Sequence[Cell]) -> None:
    """InputError where two cells have one name, so that the result of one would stand for both."""
    for name, count in Counter(slug(cell.key) for cell in cells).items():
        if count > 1:
            raise InputError(f"these settings of {experiment!r} name {count} cells {name!r}; give each of them once")


def _check_data(experiment: Experiment, scale: str, settings: Any, data: Path | None) -> None:
    needs = experiment.smoke_needs if scale == "smoke" else experiment.needs
    if callable(needs):
        needs = needs(settings)
    if data is not None and not data.is_dir():
        raise InputError(f"no data folder at {data}")
    if needs and data is None:
        raise InputError(
            f"{experiment.name!r} needs the data in {', '.join(needs)}: --data-dir FOLDER, or the environment variable "
            "SUBQUAD_DATA"
        )
    for folder in needs:
        if data is not None and not (data / folder).exists():
            raise InputError(f"{experiment.name!r} needs {data / folder}, which is not there")
