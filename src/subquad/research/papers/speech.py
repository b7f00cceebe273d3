"""Common parts of the experiments on speech: models of connected digits, run with any attention, timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from subquad import hf
from subquad.core import files
from subquad.methods import Full
from subquad.nn.auxiliary import has_auxiliary_loss, with_auxiliary_loss
from subquad.research.papers.base import AGAIN, Cell, Context, JobResults
from subquad.research.papers.data.tones import tones
from subquad.research.papers.results import Table, Value
from subquad.research.papers.tasks.connected_digits import Speech
from subquad.research.training.checkpoints import check_sealed, write_checksums
from subquad.research.training.models.blocks import SelfOrCrossAttention
from subquad.research.training.models.ctc_encoder import CTCEncoder
from subquad.research.training.run import Outcome, evaluate, read_saved, train
from subquad.research.training.settings import RunSettings, settings_of
from subquad.tools.measure.capture import recorded
from subquad.tools.measure.fidelity import attention_weights
from subquad.tools.measure.timing import Effort, spread, until_steady

RATE, HELD_OUT = "digit_error_rate", "held_out_digit_error_rate"
BASELINES = "without the sound"  # the cell of the task's baselines
TIMES = "times"  # the cell of the times
TOPS = (1, 2, 4, 8, 32)  # best keys, whose share of the attention is told
EPOCH = 1000  # utterances, of which a time is given

DEVIATIONS = (
    "Data: connected digits made of the Free Spoken Digit Dataset's recordings, and their digit error rate, in place "
    "of WSJ's phone error rate: WSJ is not free. The published figures are shown for their ranking only. Those "
    "of table 1 and figure 1 are of the validation set; all of ours are of the test takes.",
    "The blocks normalise before each part and not after it, which learns without a long warm-up; the projected frames "
    "are multiplied by √width, as embeddings are in Vaswani et al. 2017.",
    "All methods learn with one batch size. The paper gave each the largest that fitted its GPU (2 for full, 6 to 14 "
    "for the others), so that its methods differ in the number of updates an epoch too.",
)
SWITCHBOARD = (
    "CTC in place of lattice-free MMI, and one data set for both of the paper's: Switchboard is not free, and its loss "
    "needs a lattice of words."
)
SMALL_DEVIATIONS = (
    "At `small`, 3 layers with 3 heads of 32; rotary positions (fixed too, but relative), because a model of a few "
    "minutes must carry what it learned of short utterances over to long ones; three frames are one token; AdamW, a "
    "warm-up and a cosine in place of RAdam and a plateau.",
    "At `small`, a model first learns short utterances of at most 100 tokens, with full attention, then long ones with "
    "its own. There clustered attention with 100 clusters, plain or improved, is full attention (each query has a "
    "cluster of its own), so these three share the first part. Models with shared queries and keys (shared-full, "
    "reformer) share one that shared-full learned.",
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a model and of its training.

    Attributes:
        task, model, training: settings of the task `speech`.
        first_task, first_training: what differs while it learns short utterances before, with `full` or `shared-full`;
            none: it starts from drawn weights.
    """

    task: dict[str, Any]
    model: dict[str, Any]
    training: dict[str, Any]
    first_task: dict[str, Any] = field(default_factory=dict)
    first_training: dict[str, Any] = field(default_factory=dict)

    def settings(
        self, method: str, seed: int, layers: int = 0, training: Mapping[str, Any] | None = None
    ) -> RunSettings:
        """The settings of a run with this method, which has the paper's name.

        Layers 0: as in the recipe. `training`: what differs from the recipe's.
        """
        model = {**self.model, "method": method_of(method)} | ({"layers": layers} if layers else {})
        return _settings(self.task, model, {**self.training, **(training or {})}, seed)

    def first_settings(self, method: str, seed: int, layers: int = 0) -> RunSettings:
        """The settings of the earlier run on short utterances."""
        first_run = self.settings(method, seed, layers)
        first = {"method": "shared-full" if shares(method) else "full"}
        return _settings(
            {**self.task, **self.first_task},
            {**first_run.to_dict()["model"], **first},
            {**self.training, **self.first_training},
            seed,
        )


SMOKE = Recipe(
    task={"fewest": 1, "most": 3, "subsample": 4, "validation_examples": 2, "test_examples": 2},
    model={"layers": 1, "heads": 1, "width": 16},
    training={"steps": 2, "batch": 2, "warmup": 0},
    first_task={"most": 2},
    first_training={"steps": 2},
)
SMALL = Recipe(
    task={"fewest": 30, "most": 40, "subsample": 3, "validation_examples": 16, "test_examples": 48},
    model={"layers": 3, "heads": 3, "width": 96, "dropout": 0.0, "positions": "rotary"},
    training={"steps": 80, "batch": 8, "learning_rate": 1e-3, "schedule": "cosine", "warmup": 5, "every": 20},
    first_task={"fewest": 1, "most": 5, "longest": 300},
    first_training={"steps": 1500, "learning_rate": 2e-3, "schedule": "constant", "warmup": 50, "every": 500},
)
PAPER = Recipe(
    task={"validation_examples": 256, "test_examples": 1024},
    model={"layers": 9, "heads": 6, "width": 192, "feed_forward": 768, "positions": "sinusoidal"},
    training={
        "steps": 200_000,
        "batch": 16,
        "optimizer": "radam",
        "learning_rate": 1e-4,
        "clip": 10.0,
        "weight_decay": 0.01,
        "schedule": "plateau",
        "warmup": 0,
        "every": 1000,
        "patience": 20,
    },
)


def _settings(task: dict[str, Any], model: dict[str, Any], training: dict[str, Any], seed: int) -> RunSettings:
    tables = {"task": {**task, "seed": seed}, "model": model, "training": {**training, "seed": seed}}
    return settings_of("speech", tables)


def method_of(name: str) -> str:
    """A method by the paper's name: "lsh-4" has 4 rounds, "i-clustered-100" 100 clusters, "oracle-top" the top 32.

    What has settings ("oracle-top:topk=4") is as the command line writes it.
    """
    if ":" in name:
        return name
    kind, _, number = name.rpartition("-")
    known: dict[str, Callable[[], str]] = {
        "lsh": lambda: f"reformer:rounds={number}",
        "clustered": lambda: f"clustered:clusters={number}",
        "i-clustered": lambda: f"i-clustered:clusters={number}",
        "oracle": lambda: "oracle-top:topk=32",
    }
    return known[kind]() if kind in known else name


def shown(name: str) -> str:
    """A method as tables and plots name it: the paper's lsh-4 is Reformer with 4 rounds, and not the method `lsh`."""
    kind, _, rounds = name.rpartition("-")
    return f"reformer-{rounds} (the paper's {name})" if kind == "lsh" else name


def shares(name: str) -> bool:
    """Tell whether a method's queries are its keys."""
    return name == "shared-full" or name.startswith("lsh-")


def model_key(method: str, seed: int, layers: int = 0) -> str:
    """The cell of a trained model."""
    return f"train {method}{f' layers={layers}' if layers else ''} seed={seed}"


def first_key(method: str, seed: int, layers: int = 0) -> str:
    """The cell of the model that it starts from."""
    return model_key(f"{'shared-full' if shares(method) else 'full'} short utterances", seed, layers)


def model_cells(recipe: Recipe, methods: Sequence[str], seed: int, layers: int = 0) -> list[Cell]:
    """A trained model for each method, and before them those that they start from."""
    cells = {}
    for method in methods:
        first = first_key(method, seed, layers) if recipe.first_training else None
        if first is not None:
            cells[first] = Cell(first, partial(fit, recipe.first_settings(method, seed, layers), None))
        key = model_key(method, seed, layers)
        start = () if first is None else (first,)
        cells[key] = Cell(key, partial(fit, recipe.settings(method, seed, layers), first), start)
    return list(cells.values())


def fit(settings: RunSettings, first: str | None, context: Context) -> dict[str, Any]:
    """Train, save the model next to the checkpoints, and return the results."""
    start = model_of(first, context) if first else None
    outcome = train(
        settings,
        context.folder,
        data=data_of(context),
        device=context.device,
        progress=context.progress,
        start_from=start,
    )
    with files.whole_folder(context.folder / "model") as folder:
        outcome.model.save_pretrained(folder)
        write_checksums(folder)
    return record_of(outcome)


def model_of(key: str, context: Context) -> Path:
    """The folder of the model that a cell trained, as it was saved."""
    return check_sealed(context.beside(key) / "model", AGAIN)


def record_of(outcome: Outcome) -> dict[str, Any]:
    """The figures of a run, and its curves."""
    losses = [[e["step"], e["seconds"], e["loss"]] for e in outcome.history if "loss" in e]
    name = f"eval_{RATE}"
    rates = [[e["step"], e["seconds"], e[name], e["eval_loss"]] for e in outcome.history if name in e]
    return {
        "test": outcome.test,
        "validation": outcome.validation,
        "steps": outcome.steps,
        "best_step": outcome.best_step,
        "seconds": round(outcome.seconds, 1),
        "losses": losses,
        "rates": rates,
    }


def listen(settings: RunSettings, trained: str, train_with: str, method: str, context: Context) -> dict[str, Any]:
    """The test figures of a trained model that is run with another attention.

    A model that learned to use its queries as keys keeps them as keys in every method.
    """
    model = read_saved(CTCEncoder, model_of(trained, context))
    if shares(train_with):
        share_keys(model)
    hf.swap(model, method_of(method), max_length=model.config.max_position_embeddings)
    return dict(
        evaluate(settings, model.to(context.device), context.folder, data=data_of(context), device=context.device)
    )


def top_mass(settings: RunSettings, trained: str, context: Context, utterances: int = 4) -> dict[str, list[float]]:
    """{k: the share of its weight that a query gives to its k best keys, in each layer}; means over heads and queries.

    Of the first test utterances, one at a time, by exact attention.
    """
    model = read_saved(CTCEncoder, model_of(trained, context)).eval()
    task = cast(Speech, settings.task)
    test = task.splits(data_of(context)).test
    shares: list[Tensor] = []
    for i in range(min(utterances, task.test_examples)):
        batch = task.collate([test[i]])
        with torch.no_grad(), recorded(model) as calls:
            model(batch["features"])
        weights = [attention_weights(Full(), call.query, call.key, call.value, **call.options) for call in calls]
        best = torch.stack([layer.sort(descending=True).values.cumsum(-1).mean((0, 1, 2)) for layer in weights])
        shares.append(best[:, [min(k, best.shape[1]) - 1 for k in TOPS]])
    return {str(k): row.tolist() for k, row in zip(TOPS, torch.stack(shares).mean(0).T, strict=True)}


def share_keys(model: CTCEncoder) -> None:
    """Make the keys those that the queries are, for methods that read both."""
    for module in model.modules():
        if isinstance(module, SelfOrCrossAttention):
            module.k_proj.load_state_dict(module.q_proj.state_dict())


def baseline_cell(recipe: Recipe) -> Cell:
    """The cell that measures what is reached without the sound."""
    return Cell(BASELINES, partial(_baselines, recipe))


def _baselines(recipe: Recipe, context: Context) -> dict[str, Any]:
    task = recipe.settings("full", 0).task
    return task.baselines(task.splits(data_of(context)), None)


@dataclass(frozen=True)
class SpeechVariant:
    """A method in a model with a given number of layers."""

    method: str
    layers: int = 0  # 0: as in the recipe

    @property
    def label(self) -> str:
        """Its name in the results."""
        return f"{self.method}, {self.layers} layers" if self.layers else self.method


def times_cell(recipe: Recipe, timed: Sequence[SpeechVariant], effort: float) -> Cell:
    """Seconds of an update, and of a forward pass, of each, in turn, so that they meet the same noise."""
    return Cell(TIMES, partial(_times, recipe, timed, effort), timed=True)


def _times(recipe: Recipe, timed: Sequence[SpeechVariant], effort: float, context: Context) -> dict[str, Any]:
    task = cast(Speech, recipe.settings("full", 0).task)
    batch_size = recipe.settings("full", 0).training.batch
    examples = task.splits(data_of(context)).train
    batch = task.collate([examples[i] for i in range(batch_size)])
    batch = {name: tensor.to(context.device) for name, tensor in batch.items()}
    models = {one.label: _new(recipe, one, context.device) for one in timed}
    device = torch.device(context.device)
    times: dict[str, Any] = {}
    for what, call in (("update", _update), ("forward", _forward)):
        calls = {label: partial(call, model, batch) for label, model in models.items()}
        for label, seconds in until_steady(calls, Effort(seconds=effort), device).items():
            times.setdefault(label, {})[what] = list(spread(seconds))
    tokens = float(batch["attention_mask"].sum(1).float().mean()) / task.subsample
    return {"seconds": times, "batch": batch_size, "tokens": round(tokens)}


def _new(recipe: Recipe, variant: SpeechVariant, device: str) -> CTCEncoder:
    torch.manual_seed(0)
    settings = recipe.settings(variant.method, 0, variant.layers)
    return cast(CTCEncoder, settings.task.model(settings.model)).to(device)


def _update(model: CTCEncoder, batch: dict[str, torch.Tensor]) -> None:
    model.train().zero_grad()
    loss = model(**batch).loss
    assert loss is not None
    loss = with_auxiliary_loss(loss, model) if has_auxiliary_loss(model) else loss
    loss.backward()


@torch.no_grad()
def _forward(model: CTCEncoder, batch: dict[str, torch.Tensor]) -> None:
    model.eval()(**batch)


def baseline_table(records: JobResults) -> Table:
    """The baselines of every model: the accuracy of guesses."""
    rows = [[name, percent(row[RATE]), percent(row[HELD_OUT])] for name, row in records[BASELINES].items()]
    return Table(title="Without the sound", columns=["", "known speakers, %", "held-out speaker, %"], rows=rows)


def percent(share: float) -> str:
    """ "5.1"."""
    return f"{100 * share:.1f}"


def times_table(records: JobResults, models: Mapping[str, Sequence[str]]) -> Table:
    """Time of an update and of an epoch next to SDPA, updates and time to convergence, of {method: its cells}."""
    times, rows = records[TIMES], list[list[Value]]()
    exact = times["seconds"]["full"]["update"][1] if "full" in times["seconds"] else None
    for method, keys in models.items():
        low, median, high = times["seconds"][method]["update"]
        steps = [converged(records[key]) for key in keys]
        mean = sum(steps) / len(steps)
        rows.append(
            [
                shown(method),
                f"{1000 * median:.0f} ({1000 * low:.0f} to {1000 * high:.0f})",
                f"{median / times['batch'] * EPOCH:.0f}",
                None if exact is None else f"{exact / median:.2f}",
                f"{mean:.0f} of {sum(records[key]['steps'] for key in keys) / len(keys):.0f}",
                f"{mean * median:.0f}",
                f"{sum(records[key]['seconds'] for key in keys) / len(keys):.0f}",
            ]
        )
    return Table(
        title="Time, with full on SDPA",
        columns=[
            "trained with",
            "ms per update (quartiles)",
            f"s an epoch of {EPOCH:,} utterances",
            "times as fast as full",
            "updates to convergence",
            "s to convergence",
            "s of training as it ran",
        ],
        rows=rows,
        note=f"An update is a forward and a backward pass of {times['batch']} utterances, {times['tokens']} tokens "
        "each on average; all methods were timed in turn, so that they met the same load. Convergence: the first "
        "validation at most one point above the best; its time is that many updates. Models that first learned short "
        "utterances are counted from there.",
    )


def converged(record: dict[str, Any], within: float = 0.01) -> int:
    """The step of the first validation that is at most `within` (one point) worse than the best one."""
    best = min(rate for _, _, rate, _ in record["rates"])
    return int(next(step for step, _, rate, _ in record["rates"] if rate <= best + within))


def reading_tones(recipe: Recipe, cells: Sequence[Cell]) -> list[Cell]:
    """The cells; those of the scale "smoke" read tones even if a folder of real data is given."""
    return [replace(cell, run=partial(_without_data, cell.run)) for cell in cells] if recipe == SMOKE else list(cells)


def _without_data(run: Callable[[Context], dict[str, Any]], context: Context) -> dict[str, Any]:
    return run(replace(context, data=None))


def data_of(context: Context) -> Path:
    """The folder of data; if none is given, one of tones is made."""
    return context.shared("tones", tones) if context.data is None else context.data
