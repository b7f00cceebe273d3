"""Everything in a run except its steps: times, progress, checkpoints, curves, an early end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import ExportableState

from subquad.core.messages import note
from subquad.research.training.checkpoints import check, checkpoint_at, write_checksums
from subquad.tools.runs import processes

Progress = Callable[[str, int, int], None]  # what is under way, updates done, updates in all
SHOWN = 10  # steps between the lines of the log


@dataclass(eq=False)
class Carried(TrainerCallback, ExportableState):
    """State that a resumed run needs in addition to Trainer's own.

    Attributes:
        seconds: duration of the training so far.
        loss: the sum of the losses since the log's last line of them, which was that of step `logged`; a tensor between
            steps, so that it stays in fp32, and a number in checkpoints.
        logged: the step of the last such line.
        waited: validations since the best one.
    """

    seconds: float = 0.0
    loss: float | Tensor = 0.0
    logged: int = 0
    waited: int = 0

    _begun = 0.0  # when the step under way started; no field, because no checkpoint holds it

    def state(self) -> dict[str, Any]:
        """The state that Trainer writes into a checkpoint."""
        return {"args": {}, "attributes": asdict(self) | {"loss": float(self.loss)}}

    def read(self, state: TrainerState) -> None:
        """From the state that a checkpoint held."""
        kept = state.stateful_callbacks[type(self).__name__]["attributes"]
        for field in fields(self):
            setattr(self, field.name, kept[field.name])

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Restore the state of the checkpoint."""
        self.read(state)
        state.compute_steps(args, state.max_steps)  # not those of the checkpoint, whose run may have been shorter

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock: the time of a validation is not counted."""
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop the clock."""
        self.seconds += time.perf_counter() - self._begun


class Patience(TrainerCallback):
    """End training after `patience` validations without improvement, or when one is good enough."""

    def __init__(self, carried: Carried, patience: int, stop_at: float | None):
        self.carried, self.patience, self.stop_at = carried, patience, stop_at

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: dict[str, float], **_: Any
    ) -> None:
        """Count. Trainer updates `best_metric` after this."""
        value, best = metrics.get(cast(str, args.metric_for_best_model)), state.best_metric
        if value is None:  # a measurement of the test examples
            return
        better = best is None or (value > best if args.greater_is_better else value < best)
        self.carried.waited = 0 if better else self.carried.waited + 1
        if self.over(args, value if better else best):
            control.should_training_stop = True

    def over(self, args: TrainingArguments, best: float | None) -> bool:
        """Tell whether training ends before the last step, `best` being the best figure so far."""
        sign = 1 if args.greater_is_better else -1
        good = self.stop_at is not None and best is not None and sign * best >= sign * self.stop_at
        return good or (self.patience > 0 and self.carried.waited >= self.patience)


class Reporting(TrainerCallback):
    """Tell how far it is, and at once how long the first step took and what its loss is."""

    def __init__(self, progress: Progress, steps: int, carried: Carried):
        self.progress, self.steps, self.line, self.carried = progress, steps, "training", carried
        self._first = True  # of this process, whatever step it resumes from

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Keep the newest loss."""
        if logs and "loss" in logs:
            self.line = f"loss {float(logs['loss']):.4f}"

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Count the step."""
        if state.is_world_process_zero:
            if self._first:
                self._first = False
                loss = float(self.carried.loss) / (state.global_step - self.carried.logged)
                note(self.progress, f"step {state.global_step:,} of {self.steps:,}: loss {loss:.4f}")
            self.progress(self.line, state.global_step, self.steps)


class Saving(TrainerCallback):
    """Write a checkpoint when the last one is `minutes` old, in addition to those of the validations, and seal each."""

    def __init__(self, minutes: float):
        self.seconds = 60 * minutes
        self._last = time.monotonic()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The first one's time starts; the best one is looked for where the run is now."""
        self._last = time.monotonic()
        if state.best_global_step:
            state.best_model_checkpoint = str(checkpoint_at(Path(cast(str, args.output_dir)), state.best_global_step))
        self._check_best(args, state)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Process 0's clock decides, every few steps, for all of them."""
        if self.seconds and state.global_step % SHOWN == 0:
            control.should_save |= processes.agreed(time.monotonic() - self._last >= self.seconds)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The run, which is one epoch, is over: Trainer loads the best weights next."""
        processes.wait()  # for the seal that process 0 writes
        self._check_best(args, state)

    def _check_best(self, args: TrainingArguments, state: TrainerState) -> None:
        """InputError where the best checkpoint is to be loaded, but is missing or damaged."""
        if args.load_best_model_at_end and state.best_model_checkpoint:
            check(Path(state.best_model_checkpoint))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """All parts are written when all processes come here."""
        self._last = time.monotonic()
        processes.wait()
        if state.is_world_process_zero:
            write_checksums(checkpoint_at(Path(cast(str, args.output_dir)), state.global_step))


class Curves(TensorBoardCallback):
    """Curves for TensorBoard in a folder; what an interrupted run drew after its last checkpoint is taken back."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Open the file."""
        if state.is_world_process_zero:
            start = state.global_step
            self.tb_writer = SummaryWriter(str(self.folder), purge_step=start + 1 if start else None)
        super().on_train_begin(args, state, control, **more)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The file stays open for the figures of the test examples, until `close`."""

    def close(self) -> None:
        """Close the file."""
        if self.tb_writer:
            self.tb_writer.close()
