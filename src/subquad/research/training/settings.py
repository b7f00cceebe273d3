"""The settings of a training run: typed, with defaults, read from TOML and from `key=value`."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError

from subquad.core.errors import InputError, check_least
from subquad.core.reading import exists, read_bytes
from subquad.core.spelling import instead
from subquad.research.training.fine_tuning import PretrainedSettings, check_not_swapped
from subquad.research.training.model_plan import with_plan
from subquad.research.training.model_settings import STRICT, ModelSettings
from subquad.research.training.process_layout import ParallelSettings
from subquad.research.training.tasks import FINE_TUNED, TASKS
from subquad.research.training.tasks.task import Task

__all__ = [
    "ModelSettings",
    "ParallelSettings",
    "RunSettings",
    "TrainingSettings",
    "read_overrides",
    "read_toml",
    "settings_of",
]


RUN = "run"  # the table of `settings.toml` with the device of the run, which is not a setting
TABLES = ("task", "model", "training", "parallel")
# The page that lists the settings of each table.
LISTED = {name: "docs/training/tasks.md" if name == "task" else "docs/reference/training.md" for name in TABLES}


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings of a model's training.

    Attributes:
        steps: number of weight updates.
        batch: items per update, over all processes and accumulated passes.
        evaluation_batch: items per evaluation pass of a process; 0 means as many as in a training pass.
        accumulate: forward passes per update.
        learning_rate: the highest learning rate.
        optimizer: "adamw", "adam" or "radam".
        schedule: schedule of the learning rate after `warmup` updates: "constant", or "linear" or "cosine" for a
            decay to 0; "halving" halves it after each epoch, "plateau" after two validations in a row without
            improvement.
        warmup: number of updates in which the learning rate rises from 0.
        weight_decay: weight decay of the optimizer; biases and norms have none.
        clip: the largest norm of the gradient; 0 means no clipping.
        auxiliary: λ, the weight of the methods' auxiliary losses, for methods that have one.
        every: updates between validations, each with a checkpoint; 0 means at the end only.
        patience: validations without improvement after which training ends; 0 means never before `steps`.
        stop_at: the validation figure at which training ends; none means never before `steps`.
        keep: the model that is tested and saved: the "best" of the validations, or the "last".
        checkpoint_minutes: minutes between checkpoints in addition to those of the validations; 0 means none.
        precision: "fp32", or "bf16" for autocast.
        workers: data-loading processes per training process; 0 means that the training process loads the data.
        seed: random seed of the initial weights, the order of the examples and dropout; what a method draws has the
            method's own `seed`.
    """

    __pydantic_config__ = STRICT

    steps: int = 1000
    batch: int = 32
    evaluation_batch: int = 0
    accumulate: int = 1
    learning_rate: float = 1e-3
    optimizer: Literal["adamw", "adam", "radam"] = "adamw"
    schedule: Literal["constant", "linear", "cosine", "plateau", "halving"] = "linear"
    warmup: int = 0
    weight_decay: float = 0.0
    clip: float = 1.0
    auxiliary: float = 0.05
    every: int = 0
    patience: int = 0
    stop_at: float | None = None
    keep: Literal["best", "last"] = "best"
    checkpoint_minutes: float = 10.0
    precision: Literal["fp32", "bf16"] = "fp32"
    workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, steps=1, batch=1, accumulate=1, evaluation_batch=0, warmup=0, every=0, patience=0)
        check_least(self, clip=0, weight_decay=0, checkpoint_minutes=0, workers=0, seed=0)
        if self.batch % self.accumulate:
            raise ValueError(f"batch={self.batch} does not divide into accumulate={self.accumulate} passes")
        if not 0.0 <= self.auxiliary <= 1.0:
            raise ValueError(f"auxiliary={self.auxiliary}, but it must be a number from 0 to 1")
        if self.learning_rate <= 0.0:
            raise ValueError(f"learning_rate={self.learning_rate}, but it must be more than 0")
        stops = {"patience": self.patience > 0, "stop_at": self.stop_at is not None}
        for name, reads in (stops | {"schedule='plateau'": self.schedule == "plateau"}).items():
            if reads and not self.every:
                raise ValueError(f"{name} looks at validations: give every, the updates between them, too")
        if self.warmup and self.warmup >= self.steps:
            raise ValueError(f"warmup={self.warmup} does not end before the run of steps={self.steps} does")
        if self.schedule == "plateau" and self.warmup:
            raise ValueError(f"schedule='plateau' has no warm-up, but warmup={self.warmup}; give warmup=0")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """A whole run: the task with its settings, the model, the training, and how processes share it."""

    task: Task
    model: ModelSettings | PretrainedSettings = field(default_factory=ModelSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `settings_of` reads."""
        return {
            "task": {"name": self.task.name, **self.task.to_dict()},
            "model": asdict(self.model),
            "training": asdict(self.training),
            "parallel": asdict(self.parallel),
        }


def settings_of(task: str, *chosen: Mapping[str, Mapping[str, Any]]) -> RunSettings:
    """A task's own defaults, and over them what is given: tables "task", "model", "training" and "parallel".

    Later ones win.

    With `model.pretrained` the task is that of a pretrained model that is fine-tuned, with its own defaults.
    `model.plan`, the folder of a plan, replaces `model.method` by the plan's method of each layer.

    Raises:
        InputError: an unknown task, table or setting, a value that does not fit, or a plan for another model; named.
    """
    if task not in TASKS:
        raise InputError(f"no task {task!r}{instead(task, TASKS, '`subquad train` lists')}")
    kind = _kind(task, chosen)
    tables: dict[str, dict[str, Any]] = {name: dict(kind.start.get(name, {})) for name in TABLES}
    for source in chosen:
        for name, table in source.items():
            if name not in tables:
                raise InputError(f"no table [{name}]{instead(name, tables, '')}")
            tables[name] = (_without_other(tables[name], table) if name == "model" else tables[name]) | dict(table)
    name = tables["task"].pop("name", task)
    if name != task:
        raise InputError(f"the settings are of the task {name!r}, but {task!r} is to be trained")
    if not any("warmup" in source.get("training", {}) for source in chosen):
        _fit_warmup(tables["training"])
    names_method = not tables["model"].keys().isdisjoint(("method", "plan"))
    plan = tables["model"].pop("plan", None)
    model = checked(_model_kind(tables["model"]), tables["model"], "model")
    if isinstance(model, PretrainedSettings) and not names_method:
        check_not_swapped(model.pretrained)
    asked = checked(kind, tables["task"] | _of_model(kind, tables), "task")
    return RunSettings(
        task=asked,
        model=model if plan is None else with_plan(model, str(plan), asked),
        training=checked(TrainingSettings, tables["training"], "training"),
        parallel=checked(ParallelSettings, tables["parallel"], "parallel"),
    )


def _kind(task: str, chosen: Sequence[Mapping[str, Mapping[str, Any]]]) -> type[Task]:
    """The task, or what it is with a pretrained model where one is named."""
    if not any("pretrained" in source.get("model", {}) for source in chosen):
        return TASKS[task]
    if task not in FINE_TUNED:
        raise InputError(f"model.pretrained is for the task {' or '.join(FINE_TUNED)}, but {task!r} is to be trained")
    return FINE_TUNED[task]


def _model_kind(table: Mapping[str, Any]) -> type[ModelSettings] | type[PretrainedSettings]:
    """The settings of a model that is made from its sizes, or of a pretrained one, which has its own."""
    if "pretrained" not in table:
        return ModelSettings
    sizes = {f.name for f in fields(ModelSettings)} - {f.name for f in fields(PretrainedSettings)}
    for name in table:
        if name in sizes:
            raise InputError(
                f"model.{name}={table[name]!r} is given together with model.pretrained={table['pretrained']!r}, but a "
                "pretrained model has its own sizes; give one of the two"
            )
    return PretrainedSettings


def _of_model(kind: type[Task], tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The setting that tells a task which pretrained model it is for; none for other tasks."""
    if kind not in FINE_TUNED.values():
        return {}
    if "pretrained" in tables["task"]:
        raise InputError("task has no setting 'pretrained': model.pretrained names the model")
    return {"pretrained": str(tables["model"]["pretrained"])}


def _without_other(model: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The table "model" without its plan where a method is given, and without its method where a plan is."""
    if "method" in table and "plan" in table:
        raise InputError("model.method and model.plan both set what runs in the layers; give one of them")
    gone = {other for name, other in (("method", "plan"), ("plan", "method")) if name in table}
    return {name: value for name, value in model.items() if name not in gone}


def _fit_warmup(training: dict[str, Any]) -> None:
    """Make a task's own warm-up a tenth of a run that would end before it does, and 0 for a schedule without one."""
    if training.get("schedule") == "plateau":
        training["warmup"] = 0
    steps = training.get("steps")
    if isinstance(steps, int | float) and math.isfinite(steps) and 0 < steps <= training.get("warmup", 0):
        training["warmup"] = int(steps) // 10


def read_toml(path: Path) -> dict[str, dict[str, Any]]:
    """Tables of settings from a TOML file, without what a run recorded of itself in the table `RUN`."""
    return {name: table for name, table in read_tables(path).items() if name != RUN}


def read_tables(path: Path) -> dict[str, dict[str, Any]]:
    """All tables of a TOML file; `task = "name"` alone is the task's table with its name."""
    if not exists(path):
        raise InputError(f"no settings at {path}")
    content = read_bytes(path)
    try:
        tables = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise InputError(f"{path} is not TOML: {error}") from None
    if isinstance(tables.get("task"), str):
        tables["task"] = {"name": tables["task"]}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise InputError(f"{path}: {name!r} is outside the tables [task], [model], [training], [parallel]")
    return tables


def read_overrides(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`table.setting=value`, each value as TOML writes it, or as plain text."""
    tables: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        table, dot, name = key.strip().partition(".")
        if not (equals and dot and name):
            raise InputError(f"--set {text!r}: write table.setting=value, as in model.layers=6 or training.batch=64")
        if not value.strip():
            raise InputError(f"--set {text!r} has no value; give one, or '' for an empty text")
        tables.setdefault(table.strip(), {})[name.strip()] = _value(text, value)
    return tables


def _value(text: str, value: str) -> Any:
    """Parse a value as TOML; text that is not TOML stays as it is."""
    try:
        (read,) = tomllib.loads(f"value = {value}").values()  # one: text with a line feed may hold others
        return read
    except (ValueError, RecursionError):  # TOMLDecodeError is a ValueError, as is a number of too many digits
        if value.strip().startswith("["):
            raise InputError(f"--set {text!r}: write a list as TOML does, ['full', 'local:window=16']") from None
        return value.strip()


def checked(kind: type[Any], values: Mapping[str, Any], table: str) -> Any:
    """A dataclass of these values; InputError names the setting and the nearest one that there is."""
    known, wanted, entries = [f.name for f in fields(kind)], get_type_hints(kind), dict(values)
    for name, value in values.items():
        if name not in known:
            where = f"the page {LISTED[table]} lists" if table in LISTED else ""
            raise InputError(f"{table} has no setting {name!r}{instead(name, known, where, 'it has')}")
        _check_number(wanted[name], value, f"{table}.{name}")
        if wanted[name] == tuple[str, ...] and isinstance(value, str):
            entries[name] = (value,)
    try:
        return TypeAdapter(kind).validate_python(entries)
    except ValidationError as error:
        raise InputError(_message_of(error, table)) from None


def _check_number(wanted: Any, value: Any, where: str) -> None:
    """Refuse values that pydantic would accept: booleans as numbers, infinity and NaN."""
    if isinstance(value, bool) and wanted in (int, float):
        raise InputError(f"{where}={value!r}: Input should be a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where}={value!r}: Input should be a finite number")


def _message_of(error: ValidationError, table: str) -> str:
    """The first thing that pydantic found, in one line."""
    first = error.errors()[0]
    where = ".".join([table, *(str(part) for part in first["loc"][:1])])
    value = f"={first['input']!r}" if first["loc"] else ""
    return f"{where}{value}: {first['msg'].removeprefix('Value error, ')}"
