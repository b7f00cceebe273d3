"""`subquad train`: a run in a folder, with its settings, checkpoints, results and card next to the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from subquad.core import checksums as seals
from subquad.core import files
from subquad.core.errors import InputError
from subquad.research.training.callbacks import Progress
from subquad.research.training.card import training_card
from subquad.research.training.checkpoints import discard_unsealed, newest_step
from subquad.research.training.run import Outcome, train
from subquad.research.training.same_data import DATA
from subquad.research.training.settings import RunSettings, read_toml
from subquad.tools.report.files import as_json, write_files
from subquad.tools.runs import processes
from subquad.tools.runs.alone import RUNNING
from subquad.tools.runs.machine import hardware, versions

SETTINGS = "settings.toml"
RESULTS = "results.json"
CARD = "README.md"
PREDICTABLE = ("constant", "halving", "plateau")  # schedules that do not look at how long the run is to be
# Settings that may change while a run is interrupted: they decide memory and time, not what is learned.
FREE = ("accumulate", "evaluation_batch", "workers", "checkpoint_minutes")
FREE_TABLE = "parallel"  # all of it
# Settings that have come since, with the values that mean what there was before.
SINCE = {"model.piece": 0, "model.memory": 0}

Tables = dict[str, dict[str, Any]]


def run(
    settings: RunSettings, out: Path, *, data: Path | None, device: str, resume: bool, progress: Progress
) -> dict[str, Any]:
    """Train, test, save: `out` then holds model/, results.json, settings.toml, README.md and the checkpoints.

    Returns:
        The content of results.json; in all processes but the first of several, nothing.

    Raises:
        InputError: `out` holds another run, a finished one, or one to be gone on with only by `resume`; and as `train`.
    """
    main = processes.number() == 0
    if main:
        claim(settings, out, resume)
    try:
        outcome = train(settings, out, data=data, device=device, progress=progress)
    except Exception:
        if main:
            _release(out)
        raise
    if not main:
        return {}
    record = record_of(outcome, data, device)
    with files.whole_folder(out / "model") as folder:
        settings.task.save(outcome.model, folder)
    # results.json marks the run as finished, so it comes last.
    write_files({CARD: training_card(record, out.name).encode(), RESULTS: as_json(record)}, out)
    return record


def record_of(outcome: Outcome, data: Path | None, device: str) -> dict[str, Any]:
    """Everything that is known of a run, as plain data."""
    task = outcome.settings.task
    baselines: Mapping[str, Any] = task.baselines(outcome.splits, data)
    return {
        "task": {
            "name": task.name,
            "summary": task.title,
            "metric": task.metric,
            "needs": task.needs if data else None,
            **({} if task.pipeline is None else {"pipeline": task.pipeline}),
        },
        "settings": plain(outcome.settings.to_dict()),
        "model": type(outcome.model).__name__,
        "parameters": outcome.model.num_parameters(),
        "test": outcome.test,
        "validation": outcome.validation,
        "baselines": baselines,
        "steps": outcome.steps,
        "best_step": outcome.best_step,
        "training_seconds": round(outcome.seconds, 1),
        "history": outcome.history,
        "processes": processes.count(),
        "machine": hardware(device),
        "versions": versions(),
    }


def finished(settings: RunSettings, out: Path) -> dict[str, Any] | None:
    """The record of this run, if it is in the folder and finished."""
    tables, path = plain(settings.to_dict()), out / SETTINGS
    if not path.exists() or not _finished(out, tables):
        return None
    _check_same(tables, read_toml(path), out)
    return dict(seals.parsed(out / RESULTS, "remove this file"))


def claim(settings: RunSettings, out: Path, resume: bool) -> None:
    """Write down the settings of a new run, or of one that goes on.

    Raises:
        InputError: the folder contains another run, this one finished, or this one unfinished without `resume`.
    """
    tables, path = plain(settings.to_dict()), out / SETTINGS
    if not path.exists():
        if not files.empty_but_for(out, RUNNING):
            raise InputError(f"{out} is not empty and contains no run of subquad train; give another folder with --out")
    else:
        _check_same(tables, read_toml(path), out)
        if _finished(out, tables):
            raise InputError(f"{out} contains this run, finished: see {out / CARD}; --out FOLDER starts another")
        if not resume:
            raise InputError(f"{out} contains this run, unfinished: --resume continues it, --out FOLDER starts another")
    write_files({SETTINGS: tomli_w.dumps(tables).encode()}, out)


def _check_same(tables: Tables, earlier: Tables, out: Path) -> None:
    """InputError if a run cannot be resumed with these settings: only FREE and a higher training.steps may change."""
    differs = [
        f"{table}.{name}"
        for table in tables
        for name in sorted(tables[table].keys() | earlier.get(table, {}).keys())
        if earlier.get(table, {}).get(name, SINCE.get(f"{table}.{name}")) != tables[table].get(name)
        and not (table == FREE_TABLE or (table == "training" and name in FREE))
    ]
    if not differs:
        return
    if differs == ["training.steps"] and tables["training"]["steps"] > earlier["training"]["steps"]:
        schedule = tables["training"]["schedule"]
        if schedule in PREDICTABLE:
            return
        raise InputError(
            f"{out} contains a run of {earlier['training']['steps']} steps, whose learning rate (training.schedule="
            f"{schedule!r}) falls towards that end, so it cannot go on to {tables['training']['steps']}; give another "
            "folder with --out"
        )
    raise InputError(f"{out} contains a run with another {', '.join(differs)}; give another folder with --out")


def _finished(out: Path, tables: Tables) -> bool:
    """Tell whether the folder contains the results of a run with this number of steps."""
    if not (out / RESULTS).exists():
        return False
    remedy = f"remove this file; --resume then writes it again from the checkpoints in {out}"
    try:
        steps = seals.parsed(out / RESULTS, remedy)["settings"]["training"]["steps"]
    except (KeyError, TypeError):
        raise seals.Damaged(out / RESULTS, "it has no settings", remedy) from None
    return bool(steps == tables["training"]["steps"])


def _release(out: Path) -> None:
    """A run that ended before its first checkpoint leaves nothing, so that it can start again with other settings."""
    if newest_step(out) or not (out / SETTINGS).exists():
        return
    shutil.rmtree(out / "tensorboard", ignore_errors=True)
    (out / DATA).unlink(missing_ok=True)
    (out / SETTINGS).unlink()
    discard_unsealed(out)
    files.remove_parts(out)
    if not any(out.iterdir()):
        out.rmdir()


def plain(tables: Tables) -> Tables:
    """Tables that TOML can hold: without None, and with lists in place of tuples."""
    return {
        name: {k: v for k, v in json.loads(json.dumps(table)).items() if v is not None}
        for name, table in tables.items()
    }
