"""Hugging Face's Trainer, with the methods' auxiliary losses, a task's figures, exact resumption and clear ends.

Only documented parts of it are used, its arguments, callbacks, and the methods that subclasses may override; but for
`parallel.fsdp`, whose weights this file shares out in Trainer's place, so that checkpoints stay those of one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Adam, AdamW, Optimizer, RAdam
from torch.utils.data import DataLoader
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from subquad.core.errors import Ended, InputError
from subquad.methods.adaptive_span import mean_span
from subquad.nn.auxiliary import has_auxiliary_loss, with_auxiliary_loss
from subquad.research.training.callbacks import SHOWN, Carried, Patience, Progress, Reporting, Saving
from subquad.research.training.checkpoints import newest_step
from subquad.research.training.order import Order
from subquad.research.training.process_layout import Layout
from subquad.research.training.settings import TrainingSettings
from subquad.research.training.sharding import ShardedStates, shard, whole_weights
from subquad.research.training.tasks.task import Item, Splits, Task

OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "adam": Adam, "radam": RAdam}
SCHEDULES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
    "plateau": "reduce_lr_on_plateau",
    "halving": "constant",  # `MethodTrainer.create_scheduler` makes it
}


class Arguments(TrainingArguments):
    """Hugging Face's, with one GPU per process: Trainer would split batches among all that it sees."""

    __no_type_check__ = True  # jaxtyping would check the fields of Hugging Face's dataclass, which takes 0 as a float

    @property
    def n_gpu(self) -> int:
        """GPUs of this process."""
        return min(super().n_gpu, 1)


class Diverged(Ended):
    """The loss, a gradient or a weight is no longer a number."""

    def __init__(self, what: str, *, clip: float, kept: bool):
        clipping = "a smaller training.clip" if clip else "clipped gradients (training.clip, now 0: none)"
        super().__init__(
            f"{what}; {'checkpoints before it are kept' if kept else 'there is no checkpoint before it'}. A lower "
            f"training.learning_rate, a warm-up (training.warmup) or {clipping} may help"
        )


def arguments(settings: TrainingSettings, task: Task, out: Path, device: str, layout: Layout) -> Arguments:
    """Hugging Face's arguments for these settings, on the processes of this layout.

    Raises:
        InputError: a batch that does not divide among the processes, or a device other than the first of its kind.
    """
    if torch.device(device).index:
        raise InputError(f"--device {device}: choose it by CUDA_VISIBLE_DEVICES={torch.device(device).index} instead")
    shares = layout.shares * settings.accumulate
    if settings.batch % shares:
        among = f"{layout.shares} groups of {layout.settings.sequence}" if layout.splits else f"{layout.shares}"
        raise InputError(
            f"training.batch={settings.batch} does not divide among {among} processes with "
            f"training.accumulate={settings.accumulate}: give a multiple of {shares}"
        )
    every = settings.every or settings.steps
    plateau = {"patience": 1, "factor": 0.5, "mode": "max" if task.greater_is_better else "min"}
    return Arguments(
        output_dir=str(out),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch // shares,
        per_device_eval_batch_size=settings.evaluation_batch or settings.batch // shares,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=SCHEDULES[settings.schedule],
        lr_scheduler_kwargs=plateau if settings.schedule == "plateau" else {},
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip,
        seed=settings.seed,
        data_seed=settings.seed,
        dataloader_num_workers=settings.workers,
        dataloader_pin_memory=device != "cpu",
        eval_strategy="steps",
        eval_steps=every,
        save_strategy="steps",
        save_steps=every,
        save_total_limit=3,
        load_best_model_at_end=settings.keep == "best",
        metric_for_best_model=f"eval_{task.metric}",
        greater_is_better=task.greater_is_better,
        logging_steps=SHOWN,
        logging_nan_inf_filter=False,
        use_cpu=device == "cpu",
        disable_tqdm=True,
        log_level="error",
        log_level_replica="error",
        report_to="none",
        remove_unused_columns=False,
        label_names=["labels"],
        ddp_timeout=layout.seconds,
    )


class MethodTrainer(Trainer):
    """Trainer on a task: its loss (1 − λ)·task + λ·auxiliary, its figures, and what makes a resumed run the same."""

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        splits: Splits,
        settings: TrainingSettings,
        args: TrainingArguments,
        progress: Progress,
        layout: Layout,
    ):
        self.layout = layout
        self.task, self.settings, self.carried = task, settings, Carried()
        self.has_auxiliary = has_auxiliary_loss(model)
        patience = Patience(self.carried, settings.patience, settings.stop_at)
        super().__init__(
            model=cast(Any, model),
            args=args,
            train_dataset=splits.train,
            eval_dataset=cast(Any, splits.validation),
            data_collator=task.collate,
            compute_metrics=self._metrics,
            callbacks=[
                self.carried,
                patience,
                Saving(settings.checkpoint_minutes),
                Reporting(progress, settings.steps, self.carried),
            ],
            optimizer_cls_and_kwargs=(OPTIMIZERS[settings.optimizer], {"lr": settings.learning_rate}),
        )
        self.remove_callback(PrinterCallback)
        self.states: ShardedStates | None = None
        # Nothing then wraps the model: `create_optimizer` shares out its weights.
        self.is_distributed_loading_by_transformers = layout.settings.fsdp

    # ------------------------------------------------------------------ steps

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """The task's loss, and in training the auxiliary one of its layers.

        That one is added inside the model's forward pass, because what wraps the model on several processes looks there
        for the parameters that get a gradient.
        """
        with ExitStack() as hooks:
            if self.has_auxiliary and model.training:
                plain = cast(nn.Module, self.accelerator.unwrap_model(model))
                hooks.enter_context(plain.register_forward_hook(self._add_auxiliary))
            outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def _add_auxiliary(self, module: nn.Module, _: Any, outputs: Any) -> Any:
        outputs.loss = with_auxiliary_loss(outputs.loss, module, self.settings.auxiliary)
        return outputs

    def compute_loss_context_manager(self) -> torch.autocast:
        """Autocast for bf16: around the loss, so that the model itself stays as it is."""
        return torch.autocast(self.args.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16")

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One forward and backward pass.

        Raises:
            Diverged: the loss, or the gradient at the end of the step, is not finite; the weights are as before it.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        step = self.state.global_step + 1
        if not torch.isfinite(loss):
            raise self._diverged(f"the loss is {float(loss)} at step {step}")
        if self.accelerator.sync_gradients:  # the step's last pass: the gradient is whole, and equal in all processes
            norm = float(self.accelerator.clip_grad_norm_(model.parameters(), math.inf))
            if not math.isfinite(norm):
                raise self._diverged(f"the gradient's norm is {norm} at step {step}")
        self.carried.loss = self.carried.loss + loss
        return loss

    def _diverged(self, what: str) -> Diverged:
        kept = newest_step(Path(cast(str, self.args.output_dir))) > 0
        return Diverged(what, clip=self.settings.clip, kept=kept)

    def get_train_dataloader(self) -> DataLoader[Item]:
        """All examples of the run, in their order."""
        data, updates = cast(Any, self.train_dataset), self.args.max_steps
        order = Order(len(data), updates * self.settings.batch, self.settings.seed)
        return self._loader(data, self.args.train_batch_size, sampler=order, drop_last=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Item]:
        """All examples of a split, each once."""
        return self._loader(eval_dataset or self.eval_dataset, self.args.eval_batch_size)

    def _loader(self, data: Any, batch: int, **options: Any) -> DataLoader[Item]:
        """Batches of this process; processes that share the tokens of an input have the same ones."""
        loader = DataLoader(
            data,
            batch_size=batch,
            collate_fn=self.task.collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            **options,
        )
        device, layout = self.args.device, self.layout
        if not layout.splits:
            return cast(DataLoader[Item], self.accelerator.prepare(loader))
        return prepare_data_loader(loader, device, layout.shares, layout.share, put_on_device=True)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Trainer's optimizer; with `parallel.fsdp`, of weights that are shared out first."""
        if not self.layout.settings.fsdp:
            return super().create_optimizer(model)
        shard(cast(nn.Module, self.model), self.args.device.type)
        optimizer = super().create_optimizer(model)
        self.states = ShardedStates(optimizer)
        return optimizer

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Passes before the last of a step add to the whole gradient; Trainer's asks for a config of its own."""
        model = cast(FSDPModule, self.model)
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Trainer's scheduler, or one that halves the learning rate each epoch."""
        if self.settings.schedule == "halving":
            examples, batch, warmup = len(cast(Any, self.train_dataset)), self.settings.batch, self.settings.warmup

            def rate(step: int) -> float:
                return 0.5 ** (step * batch // examples) * (min(1.0, (step + 1) / warmup) if warmup else 1.0)

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, rate)
        return super().create_scheduler(num_training_steps, optimizer)

    # ------------------------------------------------------------------ figures

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """The loss of a batch, and the task's scores of its items."""
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**inputs)
            for name, value in outputs.items():
                outputs[name] = value.float() if value.is_floating_point() else value  # bf16, where autocast is
            scores = self.task.score(outputs, inputs).float()
            valid = self._valid_items(len(scores))
            loss = outputs.loss
            if valid is not None:
                loss = model(**{name: tensor[:valid] for name, tensor in inputs.items()}).loss
        return loss.detach().float().mean(), scores, torch.zeros(len(scores), device=scores.device)

    def _valid_items(self, items: int) -> int | None:
        """The number of items that are not repeats, in a last batch that several processes fill with repeated items.

        None for any other batch. Processes that share the weights call the model together, so all of them have a number
        or none has.
        """
        state = self.accelerator.gradient_state
        if self.layout.shares == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return None
        return max(1, min(items, state.remainder - self.layout.share * items))

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Trainer's, in which each item counts once, however many processes share its tokens."""
        if self.layout.splits:
            self.gather_function = self._gathered
        return super().evaluation_loop(*args, **options)

    def _gathered(self, x: Tensor) -> Tensor:
        """The rows of all items of a batch, of one process of those that share them."""
        state, layout = self.accelerator.gradient_state, self.layout
        rows = (
            self.accelerator.gather(x).unflatten(0, (layout.shares, layout.settings.sequence, -1))[:, 0].flatten(0, 1)
        )
        return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows

    def _metrics(self, predicted: EvalPrediction) -> dict[str, float]:
        return self.task.metrics(torch.from_numpy(np.asarray(predicted.predictions)))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log like Trainer, with the seconds that the steps took, and without its closing summary.

        The loss is the mean per step since the log's last line with one, even where that was before an interruption.
        The log also has the mean span of the heads that learn one.
        """
        if "train_runtime" in logs:
            return
        if "loss" in logs:
            logs["loss"] = self._mean_loss() / (self.state.global_step - self.carried.logged)
            self.carried.loss, self.carried.logged = 0.0, self.state.global_step
            span = mean_span(self.model)
            logs |= {} if span is None else {"mean_span": span}
        self.state.epoch = self.state.global_step * self.settings.batch / len(cast(Any, self.train_dataset))
        super().log({**logs, "seconds": round(self.carried.seconds, 3)}, None)

    def _mean_loss(self) -> float:
        """The mean over the processes of the losses since the log's last line with one."""
        loss = torch.as_tensor(self.carried.loss, dtype=torch.float32, device=self.args.device)
        return float(self.accelerator.gather(loss).mean())

    # ------------------------------------------------------------------ checkpoints

    def save_model(self, output_dir: str | None = None, **options: Any) -> None:
        """Save the model; Trainer calls this first for each checkpoint, in every process.

        Raises:
            Diverged: a weight is not finite.
        """
        weights = self.weights()
        for name, tensor in weights.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise self._diverged(f"{name} is not finite at step {self.state.global_step}, and is not saved")
        self.carried.loss = self._mean_loss()
        if self.states is None:
            return super().save_model(output_dir, **options)
        self.states.gather()
        self._save(output_dir, state_dict=weights)

    def weights(self) -> dict[str, Tensor]:
        """The whole state of the model; with `parallel.fsdp`, all processes call this together."""
        model = self.accelerator.unwrap_model(self.model)
        return whole_weights(model) if self.layout.settings.fsdp else model.state_dict()

    def train_from(self, checkpoint: Path | None) -> None:
        """Train, from a checkpoint where there is one; if nothing is left to do after it, its weights are read.

        Raises:
            InputError: the checkpoint with the best weights so far is missing or damaged.
        """
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            carried = Carried()
            carried.read(state)
            ends = Patience(carried, self.settings.patience, self.settings.stop_at)
            if state.global_step >= self.settings.steps or ends.over(self.args, state.best_metric):
                self.args.max_steps = state.global_step
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
