"""Train a model on a task: what `subquad train` and the experiments call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from transformers import PreTrainedModel, TrainerCallback, set_seed

from subquad import hf
from subquad.core import files
from subquad.core.errors import Ended, InputError, as_input_error, check_device
from subquad.core.messages import note
from subquad.hf.weights import check_weights
from subquad.research.training.callbacks import Curves, Progress
from subquad.research.training.checkpoints import discard_unsealed, newest
from subquad.research.training.ends import clear_ends
from subquad.research.training.process_layout import Layout
from subquad.research.training.same_data import check_same_data
from subquad.research.training.settings import RunSettings
from subquad.research.training.tasks.task import Metrics, Splits
from subquad.research.training.trainer import MethodTrainer, arguments
from subquad.tools.runs import processes

Saved = TypeVar("Saved", bound=PreTrainedModel)


@dataclass
class Outcome:
    """A trained model and the figures of its run.

    `history` is Trainer's log: dicts with `step`, `seconds` of training so far, and `loss` and `learning_rate`, or
    `eval_…` of the validation examples.
    """

    settings: RunSettings
    model: PreTrainedModel
    splits: Splits
    validation: Metrics
    test: Metrics
    history: list[dict[str, Any]]
    steps: int
    seconds: float
    best_step: int


def train(
    settings: RunSettings,
    out: Path,
    *,
    data: Path | None = None,
    device: str = "cpu",
    progress: Progress = lambda what, done, total: None,
    start_from: Path | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    begin: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train, from the newest checkpoint under `out` where there is one; then measure on the test examples.

    A new run starts from weights drawn by the seed, or from those of a model of the same sizes, whatever its attention,
    that `save_pretrained` wrote into the folder `start_from`. `callbacks` are told of its steps, as Trainer's are. The
    first process calls `begin` before it writes anything: the data is read then, and the model is made.

    The same settings give the same weights on the same machine, however often it was interrupted. Started by `torchrun`
    or `accelerate launch`, all processes share each batch.

    Raises:
        InputError: data that is missing, or not what the run was started on, a method that the model cannot run, a
            damaged checkpoint; `Ended`: memory that ran out, or a loss that is not finite (`Diverged`). Checkpoints are
            kept.
    """
    check_device(device)
    quiet()
    layout = Layout(settings.parallel)
    note(progress, "reading the data")
    splits = settings.task.splits(data)
    _check_splits(splits)
    with as_input_error():
        layout.check()
        args = arguments(settings.training, settings.task, out, device, layout)
        set_seed(settings.training.seed)
        model = settings.task.model(settings.model)
    processes.wait()  # the others have looked at the folder as it was
    if processes.number() == 0:
        begin()
        check_same_data(splits, getattr(model.config, "id2label", None), out)
    if start_from is not None:
        begin_with(model, start_from)
    if processes.number() == 0:
        for line in settings.task.notes(splits):
            note(progress, line)
    trainer = MethodTrainer(model, settings.task, splits, settings.training, args, progress, layout)
    for callback in callbacks:
        trainer.add_callback(callback)
    curves = Curves(out / "tensorboard")
    if processes.number() == 0:
        trainer.add_callback(curves)
    start = _start(out)
    if layout.part:  # their dropout is not that of the first part of the tokens
        torch.manual_seed(settings.training.seed + layout.part)
    with clear_ends(settings), files.cannot_write(out), layout.running(model):
        trainer.train_from(start)
        test = trainer.evaluate(cast(Any, splits.test), metric_key_prefix="test")
        model = _unshared(settings, trainer) if settings.parallel.fsdp else trainer.model
    curves.close()
    return _outcome(settings, trainer, cast(PreTrainedModel, model), splits, _metrics(test, "test_"))


def evaluate(
    settings: RunSettings, model: PreTrainedModel, out: Path, *, data: Path | None = None, device: str = "cpu"
) -> Metrics:
    """The test figures of a model as it is, such as one whose attention was swapped; `out` is a scratch folder."""
    quiet()
    splits = settings.task.splits(data)
    args = arguments(settings.training, settings.task, out, device, Layout())
    silent: Progress = lambda what, done, total: None  # noqa: E731
    trainer = MethodTrainer(model, settings.task, splits, settings.training, args, silent, Layout())
    with clear_ends(settings):
        return _metrics(trainer.evaluate(cast(Any, splits.test), metric_key_prefix="test"), "test_")


def quiet() -> None:
    """Messages that transformers would print are replaced by `progress` and by errors."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def begin_with(model: PreTrainedModel, folder: Path) -> None:
    """Give a model the weights of a saved one of the same sizes; what its own methods learn stays as it starts."""
    with as_input_error(f"{folder}: "):
        saved = read_saved(type(model), folder)
        hf.restore(saved)
        wanted = {name: tensor.shape for name, tensor in model.state_dict().items() if f".{hf.NAME}." not in name}
        shapes = {name: tensor.shape for name, tensor in saved.state_dict().items()}
        differs = sorted(name for name in wanted.keys() | shapes.keys() if wanted.get(name) != shapes.get(name))
        if differs:
            raise InputError(f"the model in {folder} has other sizes than this one, in {differs[0]}")
    model.load_state_dict(saved.state_dict(), strict=False)


def read_saved(kind: type[Saved], folder: Path) -> Saved:
    """A model that `save_pretrained` wrote; InputError where there is none, or with weights that are not its own."""
    try:
        # Other shapes are refused by name, like missing weights.
        saved, loading = kind.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
    except OSError as error:
        raise InputError(f"no saved model in {folder} ({str(error).splitlines()[0]})") from None
    check_weights(str(folder), saved, loading)
    return saved


def _check_splits(splits: Splits) -> None:
    sizes = {name: len(part) for name, part in vars(splits).items()}
    if not all(sizes.values()):
        listed = ", ".join(f"{count} to {name}" for name, count in sizes.items())
        raise InputError(f"the data gives {listed} on; each must have some")


def _start(out: Path) -> Path | None:
    """The checkpoint from which all processes resume, as process 0 decides."""
    checkpoint = None
    if processes.number() == 0:
        checkpoint = newest(out)
        discard_unsealed(out)
    start = processes.agreed(checkpoint)
    if start is not None and not start.is_dir():
        raise Ended(f"{start} is not here: all machines must see the folder of the run")
    return start


def _unshared(settings: RunSettings, trainer: MethodTrainer) -> PreTrainedModel:
    """The trained model in one process, from the shares of all of them."""
    weights, model = trainer.weights(), settings.task.model(settings.model)
    model.load_state_dict(weights)
    return model


def _outcome(
    settings: RunSettings, trainer: MethodTrainer, model: PreTrainedModel, splits: Splits, test: Metrics
) -> Outcome:
    history, state = trainer.state.log_history, trainer.state
    validations = [entry for entry in history if f"eval_{settings.task.metric}" in entry]
    best = next((v for v in validations if v["step"] == state.best_global_step), validations[-1])
    kept = best if settings.training.keep == "best" else validations[-1]
    return Outcome(
        settings=settings,
        model=model.eval(),
        splits=splits,
        validation=_metrics(kept, "eval_"),
        test=test,
        history=history,
        steps=state.global_step,
        seconds=trainer.carried.seconds,
        best_step=int(kept["step"]),
    )


def _metrics(entry: dict[str, Any], prefix: str) -> Metrics:
    """The metrics of an entry of the log, without their prefix and without Trainer's own times."""
    trainer_names = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    named = {key.removeprefix(prefix): value for key, value in entry.items() if key.startswith(prefix)}
    return {key: float(value) for key, value in named.items() if key not in trainer_names}
