"""`subquad train`: a run in a folder, with its settings, checkpoints, results and card next to the weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from subquad.core import files
from subquad.core.errors import InputError
from subquad.research.training.callbacks import Progress
from subquad.research.training.checkpoints import newest_step, unsealed
from subquad.research.training.model_card import training_card
from subquad.research.training.run import Outcome, train
from subquad.research.training.same_data import DATA
from subquad.research.training.settings import RUN, RunSettings, read_tables
from subquad.tools.cli.folder import ELSEWHERE, Differing, RunFolder, Settings, device_and_data, differences
from subquad.tools.report.report_files import as_json, write_files
from subquad.tools.runs import processes
from subquad.tools.runs.machine import hardware, versions

SETTINGS = "settings.toml"
CARD = "README.md"
MODEL = "model"
OUTPUTS = "|".join([r"checkpoint-\d+", *map(re.escape, ("tensorboard", DATA, MODEL, CARD, SETTINGS))])
PREDICTABLE = ("constant", "halving", "plateau")  # schedules that do not look at how long the run is to be
# Settings that may change while a run is interrupted: they decide memory and time, not what is learned.
FREE = (
    *(f"training.{name}" for name in ("accumulate", "evaluation_batch", "workers", "checkpoint_minutes")),
    "parallel.",  # all of this table
)
STEPS = "training.steps"
# Settings that have come since, with the values that mean what there was before.
SINCE = {"model.piece": 0, "model.memory": 0}

Tables = dict[str, dict[str, Any]]


def run(
    settings: RunSettings, out: Path, *, data: Path | None, device: str, again: bool, progress: Progress
) -> dict[str, Any]:
    """Train, test, save: `out` then holds model/, results.json, settings.toml, README.md and the checkpoints.

    With `again`, a finished run is removed as soon as the data is read and the model is made.

    Returns:
        The content of results.json; in all processes but the first of several, nothing.
    """
    main, folder, new = processes.number() == 0, training_folder(settings, out, device), False

    def begin() -> None:
        nonlocal new
        new = folder.begin(again)

    try:
        outcome = train(settings, out, data=data, device=device, progress=progress, begin=begin)
    except Exception:
        # One that ended before its first checkpoint leaves nothing, so that it can start again with other settings.
        if new and not newest_step(out) and not (out / MODEL).exists():
            with suppress(InputError, OSError):  # the error that ended the run is the one to report
                folder.clear()
        raise
    if not main:
        return {}
    record = record_of(outcome, data, device)
    with files.whole_folder(out / MODEL) as whole:
        settings.task.save(outcome.model, whole)
    # results.json marks the run as finished, so it comes last.
    write_files({CARD: training_card(record, out.name).encode(), folder.results.name: as_json(record)}, out)
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


def training_folder(settings: RunSettings, out: Path, device: str) -> RunFolder:
    """The folder of a run, in which some settings may change while it is interrupted."""
    tables = plain({**settings.to_dict(), RUN: device_and_data(device, None)})

    def is_complete(content: Settings) -> bool:
        return bool(content["settings"]["training"]["steps"] == tables["training"]["steps"])

    return RunFolder(
        out,
        "subquad train",
        tables,
        SETTINGS,
        OUTPUTS,
        stray=lambda: next(iter(unsealed(out)), None),
        read=read_tables,
        write=tomli_w.dumps,
        differing=partial(_differing, out),
        is_complete=is_complete,
    )


def with_earlier_warmup(
    settings: RunSettings, tables: Iterable[Mapping[str, Mapping[str, Any]]], out: Path, device: str, again: bool
) -> RunSettings:
    """The settings with the shorter warm-up of the run in `out` that continues, unless the tables give a warm-up.

    A task's default warm-up is shortened for a short run, which may continue with more steps.
    """
    if any("warmup" in table.get("training", {}) for table in tables):
        return settings
    earlier = training_folder(settings, out, device).continued(again) or {}
    warmup = earlier.get("training", {}).get("warmup")
    if not isinstance(warmup, int) or not 0 <= warmup < settings.training.warmup:
        return settings
    return replace(settings, training=replace(settings.training, warmup=warmup))


def _differing(out: Path, earlier: Settings, asked: Settings) -> Differing:
    """The settings that make a run another one: all but FREE ones, and more steps where the schedule permits them."""
    since = {name: value for name, value in SINCE.items() if name in asked}
    pairs = differences({**since, **earlier}, asked).items()
    differing = {name: both for name, both in pairs if not name.startswith(FREE)}
    before, now = differing.get(STEPS, (None, None))
    if set(differing) != {STEPS} or not before or now < before:
        return differing
    if (schedule := asked["training.schedule"]) in PREDICTABLE:
        return {}
    raise InputError(
        f"{out} contains a run of {before} steps, whose learning rate (training.schedule={schedule!r}) falls towards "
        f"that end, so it cannot go on to {now}; {ELSEWHERE}"
    )


def plain(tables: Tables) -> Tables:
    """Tables that TOML can hold: without None, and with lists in place of tuples."""
    return {
        name: {k: v for k, v in json.loads(json.dumps(table)).items() if v is not None}
        for name, table in tables.items()
    }
