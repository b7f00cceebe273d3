"""Train a model on a task: what `subquad train` and the experiments call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import set_seed

from subquad.errors import InputError, as_input_error, check_device
from subquad.training.checkpoints import newest
from subquad.training.models.blocks import AttentionModel
from subquad.training.settings import Settings
from subquad.training.tasks.base import Figures, Splits
from subquad.training.trainer import MethodTrainer, Progress, arguments


@dataclass
class Outcome:
    """A trained model, and how it came about.

    `history` is Trainer's log: dicts with `step`, `seconds` of training so far, and `loss` and `learning_rate`, or
    `eval_…` of the validation examples.
    """

    settings: Settings
    model: AttentionModel
    splits: Splits
    validation: Figures
    test: Figures
    history: list[dict[str, Any]]
    steps: int
    seconds: float
    best_step: int


def train(
    settings: Settings,
    out: Path,
    *,
    data: Path | None = None,
    device: str = "cpu",
    progress: Progress = lambda what, done, total: None,
) -> Outcome:
    """Train, from the newest checkpoint under `out` where there is one; then measure on the test examples.

    The same settings give the same weights on the same machine, however often it was interrupted. Started by `torchrun`
    or `accelerate launch`, all processes share each batch.

    Raises:
        InputError: data that is missing, a method that the model cannot run, a damaged checkpoint, memory that runs
            out, or a loss that is no number (`Diverged`). Checkpoints are kept.
    """
    check_device(device)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    start = newest(out)
    splits = settings.task.splits(data)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    with as_input_error():
        args = arguments(settings.training, settings.task, out, device, processes)
        set_seed(settings.training.seed)
        model = settings.task.model(settings.model)
    trainer = MethodTrainer(model, settings.task, splits, settings.training, args, progress)
    with _clear_ends(settings):
        trainer.train(resume_from_checkpoint=str(start) if start else None)
        test = trainer.evaluate(cast(Any, splits.test), metric_key_prefix="test")
    history, state = trainer.state.log_history, trainer.state
    validations = [entry for entry in history if f"eval_{settings.task.metric}" in entry]
    best = next((v for v in validations if v["step"] == state.best_global_step), validations[-1])
    kept = best if args.load_best_model_at_end else validations[-1]
    return Outcome(
        settings=settings,
        model=model.eval(),
        splits=splits,
        validation=_figures(kept, "eval_"),
        test=_figures(test, "test_"),
        history=history,
        steps=state.global_step,
        seconds=trainer.clock.total(state),
        best_step=int(kept["step"]),
    )


def evaluate(
    settings: Settings, model: AttentionModel, out: Path, *, data: Path | None = None, device: str = "cpu"
) -> Figures:
    """The test figures of a model as it is, such as one whose attention was swapped; `out` is a scratch folder."""
    splits = settings.task.splits(data)
    args = arguments(settings.training, settings.task, out, device, 1)
    trainer = MethodTrainer(model, settings.task, splits, settings.training, args, lambda what, done, total: None)
    with _clear_ends(settings):
        return _figures(trainer.evaluate(cast(Any, splits.test), metric_key_prefix="test"), "test_")


def _figures(entry: dict[str, Any], prefix: str) -> Figures:
    """The metrics of an entry of the log, without their prefix and without Trainer's own times."""
    own = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    named = {key.removeprefix(prefix): value for key, value in entry.items() if key.startswith(prefix)}
    return {key: float(value) for key, value in named.items() if key not in own}


@contextmanager
def _clear_ends(settings: Settings) -> Iterator[None]:
    """Memory that runs out, and settings that turn out wrong in the first pass, as InputErrors."""
    try:
        with as_input_error():
            yield
    except (RuntimeError, MemoryError) as error:
        lacking = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not lacking:
            raise
        batch = settings.training.batch
        raise InputError(
            f"out of memory with training.batch={batch} in training.accumulate={settings.training.accumulate} passes: "
            "give more passes (training.accumulate), a smaller batch or shorter inputs; checkpoints are kept"
        ) from error
