"""One trial: a training run that reports its validations to the study, and ends early if the study asks for it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback

from subquad.core.errors import InputError
from subquad.research.training.run import train
from subquad.research.training.settings import RunSettings
from subquad.research.training.tasks.task import Task
from subquad.research.tuning.study import Study
from subquad.tools.runs.jobs import Progress

State = Literal["finished", "pruned", "failed"]


@dataclass
class Tried:
    """The outcome of a trial; its figures are those of the validation examples."""

    state: State
    value: float | None = None  # of the task's metric
    figures: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    reason: str | None = None


@dataclass(frozen=True)
class Trial:
    """A trial as plain data: its settings, and where it runs."""

    number: int
    settings: RunSettings | str  # or why the values do not go together
    folder: Path  # the folder of its checkpoints
    study: Path  # the folder of the study
    data: Path | None
    device: str
    prune: bool

    def run(self, progress: Progress) -> Tried:
        """Train. A trial that cannot be trained, diverges or runs out of memory fails; the search goes on."""
        if isinstance(self.settings, str):
            return Tried("failed", reason=self.settings)
        reports, begun = _Reports(self, self.settings.task), time.perf_counter()
        try:
            outcome = train(
                self.settings, self.folder, data=self.data, device=self.device, progress=progress, callbacks=[reports]
            )
        except _Pruned as pruned:
            return Tried("pruned", pruned.value, steps=pruned.step, seconds=round(time.perf_counter() - begun, 1))
        except InputError as error:
            return Tried("failed", reason=str(error))
        value = outcome.validation[self.settings.task.metric]
        if not math.isfinite(value):
            return Tried("failed", reason=f"the validation gave {self.settings.task.metric} {value}")
        return Tried("finished", value, outcome.validation, outcome.steps, round(outcome.seconds, 1))


class _Pruned(Exception):
    """The study ends a trial, whose newest value this is."""

    def __init__(self, value: float, step: int):
        super().__init__(f"pruned at step {step}")
        self.value, self.step = value, step


class _Reports(TrainerCallback):
    """Tells the study each validation."""

    def __init__(self, trial: Trial, task: Task):
        self.trial, self.metric = trial, task.metric
        self.study = Study(trial.study, task.greater_is_better, trial.prune)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        """Report the value, and end the training where the study prunes it. Figures of test examples are not told."""
        value = metrics.get(f"eval_{self.metric}")
        if value is not None and self.study.is_pruned(self.trial.number, state.global_step, value):
            raise _Pruned(value, state.global_step)
