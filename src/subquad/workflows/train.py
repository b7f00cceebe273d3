"""`subquad train`: a run in a folder, with its settings, checkpoints, results and card beside the weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from subquad.errors import InputError
from subquad.report.files import as_json, write_files
from subquad.report.training_card import training_card
from subquad.training.run import Outcome, train
from subquad.training.settings import Settings, read_toml
from subquad.training.trainer import Progress
from subquad.workflows.machine import hardware, versions

SETTINGS = "settings.toml"
RESULTS = "results.json"


def run(
    settings: Settings, out: Path, *, data: Path | None, device: str, resume: bool, progress: Progress
) -> dict[str, Any]:
    """Train, test, save: `out` then holds model/, results.json, settings.toml, README.md and the checkpoints.

    Raises:
        InputError: `out` holds another run, a finished one, or one to be gone on with only by `resume`; and as `train`.
    """
    main = int(os.environ.get("RANK", "0")) == 0
    _claim(settings, out, resume, write=main)
    outcome = train(settings, out, data=data, device=device, progress=progress)
    record = record_of(outcome, data, device)
    if main:
        outcome.model.save_pretrained(out / "model")
        write_files({RESULTS: as_json(record), "README.md": training_card(record, out.name).encode()}, out)
    return record


def record_of(outcome: Outcome, data: Path | None, device: str) -> dict[str, Any]:
    """Everything that is known of a run, as plain data."""
    task = outcome.settings.task
    baselines: Mapping[str, Any] = task.baselines(outcome.splits, data)
    return {
        "task": {"name": task.name, "summary": task.summary, "metric": task.metric},
        "settings": outcome.settings.to_dict(),
        "model": type(outcome.model).__name__,
        "parameters": outcome.model.num_parameters(),
        "test": outcome.test,
        "validation": outcome.validation,
        "baselines": baselines,
        "steps": outcome.steps,
        "best_step": outcome.best_step,
        "training_seconds": round(outcome.seconds, 1),
        "history": outcome.history,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "machine": hardware(device),
        "versions": versions(),
    }


def _claim(settings: Settings, out: Path, resume: bool, *, write: bool) -> None:
    """Write down the settings of a new run; InputError where the folder holds another one, or this one unasked."""
    path = out / SETTINGS
    given = plain(settings.to_dict())
    if path.exists():
        there: dict[str, Any] = read_toml(path)
        differs = [f"{t}.{k}" for t in given for k in given[t] if there.get(t, {}).get(k) != given[t][k]]
        if differs:
            raise InputError(f"{out} holds a run with another {', '.join(differs)}; give another folder with --out")
        if (out / RESULTS).exists():
            raise InputError(f"{out} holds this run, finished: see {out / 'README.md'}; --out FOLDER starts another")
        if not resume:
            raise InputError(f"{out} holds this run, unfinished: --resume goes on with it, --out FOLDER starts another")
        return
    if resume:
        raise InputError(f"{out} holds no run to resume")
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty and holds no run of subquad train; give another folder with --out")
    if write:
        write_files({SETTINGS: tomli_w.dumps(given).encode()}, out)


def plain(tables: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """As TOML can hold it: without None, tuples as lists."""
    return {
        name: {k: v for k, v in json.loads(json.dumps(table)).items() if v is not None}
        for name, table in tables.items()
    }
