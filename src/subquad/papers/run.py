"""Run an experiment cell by cell, each kept as soon as it is done; then its tables and plots."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from subquad import files, seals
from subquad.errors import InputError, check_device
from subquad.papers.base import SCALES, Cell, Context, Experiment, Progress, slug
from subquad.papers.overrides import as_options, changed
from subquad.report.experiment import Header, Results
from subquad.workflows.alone import RUNNING
from subquad.workflows.machine import hardware, versions


def reproduce(
    experiment: Experiment,
    scale: str,
    out: Path,
    *,
    data: Path | None = None,
    device: str = "cpu",
    resume: bool = False,
    changes: Mapping[str, Any] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> tuple[Header, Results, dict[str, Any]]:
    """Run all cells that `out` does not hold, and say what came out: what it is, the results, what each cell gave.

    `changes` are settings in place of those of the scale.

    Raises:
        InputError: an unknown scale, missing data, or a folder that holds another run, or this one without `resume`.
    """
    if scale not in SCALES:
        raise InputError(f"no scale {scale!r}; there are {', '.join(SCALES)}")
    check_device(device)
    settings = changed(experiment.scales[scale], changes or {})
    _check_data(experiment, scale, settings, data)
    _claim(out, {"experiment": experiment.name, "scale": scale, "settings": asdict(settings)}, resume)
    with _fitting(experiment, changes or {}):
        cells = list(experiment.cells(settings))
    if not cells:
        raise InputError(f"nothing to run: these settings of {experiment.name!r} leave no cell")
    found: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        progress(cell.key, number, len(cells))
        folder = out / "cells" / slug(cell.key)

        def inner(what: str, done: int, total: int, number: int = number, cell: Cell = cell) -> None:
            progress(f"{cell.key}: {what} {done}/{total}", number, len(cells))

        with _fitting(experiment, changes or {}):
            found[cell.key] = _kept(folder, cell, Context(folder, data, device, inner))
    progress("done", len(cells), len(cells))
    header = Header(
        name=experiment.name,
        title=experiment.title,
        source=experiment.source,
        scale=scale,
        command=shlex.join(["subquad", "reproduce", experiment.name, "--scale", scale, *as_options(changes or {})]),
        settings=asdict(settings),
        deviations=experiment.deviations,
        machine={**hardware(device), **versions()},
        seconds=sum(cell["seconds"] for cell in found.values()),
    )
    with _fitting(experiment, changes or {}):
        results = experiment.results(settings, {key: cell["result"] for key, cell in found.items()})
    return header, results, found


@contextmanager
def _fitting(experiment: Experiment, changes: Mapping[str, Any]) -> Iterator[None]:
    """What settings that the user changed bring about, in one line: an experiment is only known to run with its own.

    An error with the settings of the scale is a mistake of ours, and goes on.
    """
    try:
        yield
    except (InputError, OSError):
        raise
    except Exception as error:
        if not changes:
            raise
        given = shlex.join(as_options(changes))
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{experiment.name!r} does not run with {given}: {reason}") from error


def _kept(folder: Path, cell: Cell, context: Context) -> dict[str, Any]:
    """What a cell gave, from an earlier run or from now, with the seconds of the run that ended."""
    path = folder.with_name(folder.name + ".json")
    if path.exists():
        return _read(path, cell)
    files.make_folder(folder)
    begun = time.perf_counter()
    result = cell.run(context)
    seconds = round(time.perf_counter() - begun, 2)
    files.write(path, seals.sealed_json({"cell": cell.key, "result": result, "seconds": seconds}))
    return _read(path, cell)


def _read(path: Path, cell: Cell) -> dict[str, Any]:
    """What a cell's file holds, checked."""
    remedy = "remove this file; --resume then runs the cell again"
    kept = seals.read_json(path, remedy)
    if (whose := kept.pop("cell")) != cell.key:
        raise seals.Damaged(path, f"it is of the cell {whose!r}, not of {cell.key!r}", remedy)
    return kept


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


def _claim(out: Path, run: dict[str, Any], resume: bool) -> None:
    """Write down which run a folder holds; InputError where it holds another, or this one and is not to go on."""
    path = out / "run.json"
    run = json.loads(json.dumps(run))
    begun = any(file.is_file() and not files.is_part(file) for file in (out / "cells").rglob("*"))
    if begun and not path.exists():
        raise InputError(
            f"{out} holds cells of a run but no {path.name} that says which; give another folder with --out"
        )
    if begun:
        there = seals.parsed(path, "give another folder with --out")
        if there != run:
            raise InputError(f"{out} holds another run ({_difference(there, run)}); give another folder with --out")
        if not resume:
            raise InputError(f"{out} holds this run already: --resume goes on with it, --out FOLDER starts another")
        return
    if not files.empty_but_for(out, [path.name, "cells", *RUNNING]):
        raise InputError(f"{out} is not empty and holds no run of this; give another folder with --out")
    files.write(path, json.dumps(run, indent=1))


def _difference(there: dict[str, Any], run: dict[str, Any]) -> str:
    """What of another run is another: the experiment, the scale, or settings by name."""
    for key in ("experiment", "scale"):
        if there.get(key) != run[key]:
            return f"{key} {there.get(key)}, not {run[key]}"
    new, found = run["settings"], there.get("settings")
    old = found if isinstance(found, dict) else {}
    return f"another {', '.join(name for name in new if old.get(name) != new[name]) or 'version of its settings'}"
