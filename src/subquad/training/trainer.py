"""Hugging Face's Trainer, with the methods' auxiliary losses, a task's figures, and ends that are clear."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    EarlyStoppingCallback,
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback

from subquad.errors import InputError
from subquad.nn.auxiliary import has_auxiliary_loss, with_auxiliary_loss
from subquad.training.checkpoints import seal
from subquad.training.settings import TrainingSettings
from subquad.training.tasks.base import Splits, Task

Progress = Callable[[str, int, int], None]  # what is under way, updates done, updates in all

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "radam": torch.optim.RAdam,
}
SCHEDULES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
    "plateau": "reduce_lr_on_plateau",
    "halving": "constant",  # `MethodTrainer.create_scheduler` makes it
}
SHOWN = 10  # steps between the lines of a log, and between the checks that the loss is finite


class Diverged(InputError):
    """The loss, or a weight, is no longer a number."""


def arguments(settings: TrainingSettings, task: Task, out: Path, device: str, processes: int) -> TrainingArguments:
    """Hugging Face's arguments for these settings.

    Raises:
        InputError: a batch that does not divide among the processes.
    """
    shares = processes * settings.accumulate
    if settings.batch % shares:
        raise InputError(
            f"training.batch={settings.batch} does not divide among {processes} processes with "
            f"training.accumulate={settings.accumulate}: give a multiple of {shares}"
        )
    every = settings.every or settings.steps
    plateau = {"patience": 1, "factor": 0.5, "mode": "max" if task.greater_is_better else "min"}
    return TrainingArguments(
        output_dir=str(out),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch // shares,
        per_device_eval_batch_size=settings.evaluation_batch or settings.batch,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=SCHEDULES[settings.schedule],
        lr_scheduler_kwargs=plateau if settings.schedule == "plateau" else {},
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        bf16=settings.precision == "bf16",
        seed=settings.seed,
        data_seed=settings.seed,
        dataloader_drop_last=True,
        dataloader_num_workers=settings.workers,
        dataloader_pin_memory=device != "cpu",
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=3,
        load_best_model_at_end=settings.keep == "best" or bool(settings.patience),
        metric_for_best_model=f"eval_{task.metric}",
        greater_is_better=task.greater_is_better,
        logging_steps=SHOWN,
        logging_nan_inf_filter=False,
        use_cpu=device == "cpu",
        disable_tqdm=True,
        log_level="error",
        report_to="none",
        remove_unused_columns=False,
        label_names=["labels"],
    )


class MethodTrainer(Trainer):
    """Trainer on a task: (1 − λ)·task + λ·auxiliary, its figures, times of the steps in the log, no NaN on the disk."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        splits: Splits,
        settings: TrainingSettings,
        args: TrainingArguments,
        progress: Progress,
    ):
        self.task, self.settings = task, settings
        self.auxiliary = has_auxiliary_loss(model)
        self.clock = Clock()
        callbacks: list[TrainerCallback] = [self.clock, Reporting(progress, settings.steps), Sealing()]
        if settings.patience:
            callbacks.append(EarlyStoppingCallback(settings.patience))
        if args.process_index == 0:
            callbacks.append(_tensorboard(Path(cast(str, args.output_dir))))
        super().__init__(
            model=cast(Any, model),
            args=args,
            train_dataset=splits.train,
            eval_dataset=cast(Any, splits.validation),
            data_collator=task.collate,
            compute_metrics=self._figures,
            callbacks=callbacks,
            optimizer_cls_and_kwargs=(OPTIMIZERS[settings.optimizer], {"lr": settings.learning_rate}),
        )
        self.remove_callback(PrinterCallback)

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """The task's loss, and in training the auxiliary one of its layers."""
        outputs = model(**inputs)
        loss = outputs.loss
        if self.auxiliary and model.training:
            loss = with_auxiliary_loss(loss, model, self.settings.auxiliary)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One forward and backward pass.

        Raises:
            Diverged: its loss is not finite.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            raise Diverged(
                f"the loss is {float(loss)} at step {self.state.global_step + 1}; checkpoints before it are kept. "
                "A lower training.learning_rate, a warm-up (training.warmup) or a smaller training.clip may help"
            )
        return loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """The loss of a batch, and the task's scores of its items."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
        scores = self.task.score(outputs, inputs).float()
        return outputs.loss.detach().float().mean(), scores, torch.zeros(len(scores), device=scores.device)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """As Trainer's, with the last batch, whatever its size."""
        self.args.dataloader_drop_last = False
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.args.dataloader_drop_last = True

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As Trainer's, or half the learning rate each epoch."""
        if self.settings.schedule == "halving":
            length = max(1, len(cast(Any, self.train_dataset)) // self.settings.batch)
            warmup = self.settings.warmup

            def rate(step: int) -> float:
                return 0.5 ** (step // length) * (min(1.0, (step + 1) / warmup) if warmup else 1.0)

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, rate)
        return super().create_scheduler(num_training_steps, optimizer)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As Trainer's, with the seconds that the steps took so far."""
        super().log({**logs, "seconds": round(self.clock.total(self.state), 3)}, None)

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any, **kwargs: Any) -> None:
        for name, tensor in self.accelerator.unwrap_model(self.model).state_dict().items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise Diverged(
                    f"{name} is not finite at step {self.state.global_step}, so no checkpoint of it is written; those "
                    "before it are kept. A lower training.learning_rate or a smaller training.clip may help"
                )
        super()._save_checkpoint(model, trial, *args, **kwargs)

    def _figures(self, predicted: EvalPrediction) -> dict[str, float]:
        return self.task.figures(torch.from_numpy(np.asarray(predicted.predictions)))


class Clock(TrainerCallback):
    """How long the steps took, those before a resumption too: training alone, without validation."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun: float | None = None
        self._before: float | None = None

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start."""
        if self._begun is None:
            self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop."""
        if self._begun is not None:
            self.seconds += time.perf_counter() - self._begun
            self._begun = None

    def total(self, state: TrainerState) -> float:
        """With what the log says of the steps before this process."""
        if self._before is None:
            said = [entry["seconds"] for entry in state.log_history if "seconds" in entry]
            self._before = said[-1] if said else 0.0
        return self._before + self.seconds


class Reporting(TrainerCallback):
    """Tell how far it is."""

    def __init__(self, progress: Progress, steps: int):
        self.progress, self.steps, self.line = progress, steps, "training"

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Keep the newest loss."""
        if logs and "loss" in logs:
            self.line = f"loss {float(logs['loss']):.4f}"

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """One more."""
        if state.is_world_process_zero:
            self.progress(self.line, state.global_step, self.steps)


class Sealing(TrainerCallback):
    """Seal each checkpoint once all processes have written their part."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """All of them are written when all processes come here."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            seal(Path(cast(str, args.output_dir)) / f"checkpoint-{state.global_step}")


def _tensorboard(out: Path) -> TrainerCallback:
    """Curves for TensorBoard, under the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    return TensorBoardCallback(SummaryWriter(str(out / "tensorboard")))
