"""Figure 4 of LHA: what training does to the hash functions of a language model, with either membership in ψ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from subquad import hf
from subquad.core import checksums as seals
from subquad.core import files
from subquad.methods import BoundMethod
from subquad.research.papers.base import AGAIN, Cell, Context, Experiment, JobResults, note_on_seeds
from subquad.research.papers.made_text import made_text
from subquad.research.papers.results import Lines, Results, Table, Value
from subquad.research.training.run import train
from subquad.research.training.settings import RunSettings, settings_of
from subquad.tools.measure.capture import without_padded_queries
from subquad.tools.measure.dynamics import hash_dynamics
from subquad.tools.measure.hooks import scores

METRICS = ("kl_query", "kl_key", "negative_entropy_query", "negative_entropy_key", "largest")
SIDES = {"query": "queries", "key": "keys"}
MEMBERSHIPS = {"balanced": "balanced", "argmax": "argmax, as in the paper"}
Record = dict[int, dict[str, float]]  # by step: the mean over the layers of each figure


@dataclass(frozen=True, kw_only=True)
class TrainingDynamicsScale:
    """The settings: what is trained, how often it is looked at, and on how many windows of validation text."""

    corpus: str  # a folder of the data; "": some made text
    length: int
    model: dict[str, Any]
    training: dict[str, Any]
    every: int
    windows: int
    buckets: int = 8
    targets: str = "exact"
    limit: int = 0
    seeds: tuple[int, ...] = (0,)


SCALES = {
    "smoke": TrainingDynamicsScale(
        corpus="",
        length=32,
        model={"layers": 1, "heads": 2, "width": 16, "feed_forward": 32},
        training={"steps": 4, "batch": 2},
        every=2,
        windows=2,
    ),
    "small": TrainingDynamicsScale(
        corpus="wikitext-2",
        length=128,
        model={"layers": 2, "heads": 4, "width": 64, "feed_forward": 256, "dropout": 0.0},
        training={"steps": 600, "batch": 8, "learning_rate": 3e-3, "warmup": 60, "schedule": "cosine"},
        every=20,
        windows=4,
        limit=50_000,
    ),
    "paper": TrainingDynamicsScale(
        corpus="wikitext-103",
        length=1536,
        model={"layers": 16, "heads": 10, "width": 410, "feed_forward": 2100, "dropout": 0.2},
        training={"steps": 6000, "batch": 32, "learning_rate": 3.5e-4, "warmup": 2000, "schedule": "cosine"},
        every=50,
        windows=4,
        targets="features",
    ),
}


class Watch(TrainerCallback):
    """Figures of a model's hash functions on a fixed batch, every few steps, written to a file when measured.

    A run that goes on writes those of the steps that it repeats again.
    """

    def __init__(self, path: Path, batch: dict[str, Tensor], every: int):
        self.path, self.batch, self.every = path, batch, every
        kept = seals.read_json(path, AGAIN) if path.exists() else {}
        self.record: Record = {int(step): metrics for step, metrics in kept.items()}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Record the figures before the first step; a resumed run has them."""
        if state.global_step == 0:
            self._look(0, more["model"])

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """After some steps."""
        if state.global_step % self.every == 0:
            self._look(state.global_step, more["model"])

    def _look(self, step: int, model: Any) -> None:
        self.record[step] = dynamics_of(model, {k: v.to(model.device) for k, v in self.batch.items()})
        files.write(self.path, seals.sealed_json({str(step): metrics for step, metrics in self.record.items()}))


@torch.no_grad()
def dynamics_of(model: Any, batch: dict[str, Tensor]) -> dict[str, float]:
    """The means over the layers of `hash_dynamics`, and of the share of tokens in the largest bucket of a head."""
    training = model.training
    with listening(model.eval()) as heard:
        model(**batch)
    model.train(training)
    return {name: statistics.fmean(layer[name] for layer in heard) for name in METRICS}


@contextmanager
def listening(model: Any) -> Iterator[list[dict[str, float]]]:
    """Collect the figures of each layer that runs."""
    heard: list[dict[str, float]] = []

    def hear(module: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        bound, query, key = module.get_submodule("bound"), *inputs[:2]
        assert isinstance(bound, BoundMethod)
        asked = {name: value for name, value in without_padded_queries(**options).items() if name != "dropout_p"}
        labels = scores(bound, query, key, **asked)[0].argmax(-1)
        counts = nn.functional.one_hot(labels).sum(2)
        largest = (counts.amax(-1) / labels.shape[2]).mean()
        heard.append(asdict(hash_dynamics(bound, query, key, **asked)) | {"largest": float(largest)})

    layers = [layer.module.get_submodule(hf.NAME) for layer in hf.find_layers(model)]
    handles = [layer.register_forward_pre_hook(hear, with_kwargs=True) for layer in layers]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def key(membership: str, seed: int) -> str:
    """A cell's name."""
    return f"membership={membership} seed={seed}"


def cells(scale: TrainingDynamicsScale) -> list[Cell]:
    """One trained model each."""
    return [
        Cell(key(membership, seed), partial(_watched, scale, membership, seed))
        for seed in scale.seeds
        for membership in MEMBERSHIPS
    ]


def _settings(scale: TrainingDynamicsScale, membership: str, seed: int, context: Context) -> RunSettings:
    method = f"lha:buckets={scale.buckets},selection=argmax,membership={membership},targets={scale.targets}"
    text = {"corpus": scale.corpus} if scale.corpus else {"files": str(made_text(context.folder))}
    tables = {
        "task": {**text, "length": scale.length, "limit": scale.limit, "seed": seed},
        "model": {**scale.model, "method": method, "positions": "layer-sinusoidal"},
        "training": {**scale.training, "seed": seed},
    }
    return settings_of("lm", tables)


def _watched(scale: TrainingDynamicsScale, membership: str, seed: int, context: Context) -> dict[str, Any]:
    settings = _settings(scale, membership, seed, context)
    validation = settings.task.splits(context.data).validation
    batch = settings.task.collate([validation[i] for i in range(scale.windows)])
    watch = Watch(context.folder / "dynamics.json", {k: batch[k] for k in batch if k != "labels"}, scale.every)
    outcome = train(
        settings,
        context.folder,
        data=context.data,
        device=context.device,
        progress=context.progress,
        callbacks=[watch],
    )
    steps = sorted(watch.record)
    return {
        "steps": steps,
        "figures": {name: [watch.record[step][name] for step in steps] for name in METRICS},
        "test": outcome.test,
        "training_seconds": outcome.seconds,
    }


def results(scale: TrainingDynamicsScale, records: JobResults) -> Results:
    """The four curves of the figure for either membership, and where they start, turn and end."""
    curves = {m: _curves(scale, records, m) for m in MEMBERSHIPS}
    plots = [
        _plot(curves, "kl", "KL divergence", "nats"),
        _plot(curves, "negative_entropy", "negative entropy of ψ", "nats", {"spread evenly": -math.log(scale.buckets)}),
        Lines(
            file="training-dynamics-largest-bucket",
            title="tokens in the largest bucket",
            x="step",
            y="share of a window's tokens, mean over heads",
            series={label: curves[m]["largest"] for m, label in MEMBERSHIPS.items()},
            levels={"evenly": 1 / scale.buckets, "all in one": 1.0},
        ),
    ]
    columns = ["membership in ψ", "figure", "start", "highest", "at step", "end", "share of intervals rising"]
    rows = [row for m in MEMBERSHIPS for row in _rows(MEMBERSHIPS[m], curves[m])]
    table = Table(
        title="Starts, turning points and ends of the curves",
        columns=columns,
        rows=rows,
        note="Published, as curves without numbers: the negative entropy rises consistently for queries and keys; the "
        f"KL divergence first rises, then falls. Means over {len(scale.seeds)} seed(s). Negative entropy is −ln "
        f"{scale.buckets} = {-math.log(scale.buckets):.3f} where ψ is spread evenly, 0 where each token's attention "
        "lies in one bucket; also 0 where all tokens are in one bucket, which the share in the largest tells apart."
        + note_on_seeds(scale.seeds),
    )
    return Results(
        summary=f"A language model with {scale.buckets} hash buckets in every head, trained while its hash functions "
        "learn. Figures of windows of the validation text.",
        tables=[table, _losses(scale, records)],
        plots=plots,
    )


def _curves(scale: TrainingDynamicsScale, records: JobResults, membership: str) -> dict[str, list[tuple[float, float]]]:
    """Curves by figure: (step, mean over the seeds), at the steps that all seeds have."""
    runs = [records[key(membership, seed)] for seed in scale.seeds]
    steps = sorted(set.intersection(*(set(run["steps"]) for run in runs)))
    return {
        name: [
            (float(step), statistics.fmean(run["figures"][name][run["steps"].index(step)] for run in runs))
            for step in steps
        ]
        for name in METRICS
    }


def _plot(curves: dict[str, Any], figure: str, title: str, unit: str, levels: dict[str, float] | None = None) -> Lines:
    series = {
        f"{tokens}, {label}": curves[m][f"{figure}_{side}"]
        for m, label in MEMBERSHIPS.items()
        for side, tokens in SIDES.items()
    }
    return Lines(
        file=f"training-dynamics-{figure.replace('_', '-')}",
        title=title,
        x="step",
        y=f"{title}, {unit}",
        series=series,
        levels=levels or {},
    )


def _rows(membership: str, curves: dict[str, list[tuple[float, float]]]) -> list[list[Value]]:
    names = {
        "kl_query": "KL, queries",
        "kl_key": "KL, keys",
        "negative_entropy_query": "negative entropy, queries",
        "negative_entropy_key": "negative entropy, keys",
        "largest": "share in the largest bucket",
    }
    rows: list[list[Value]] = []
    for name, label in names.items():
        steps, values = zip(*curves[name], strict=True)
        top = max(range(len(values)), key=values.__getitem__)
        rises = [b > a for a, b in pairwise(values)]
        numbers = [f"{values[0]:.3f}", f"{values[top]:.3f}", f"{steps[top]:.0f}", f"{values[-1]:.3f}"]
        rows.append([membership, label, *numbers, f"{statistics.fmean(rises):.0%}"])
    return rows


def _losses(scale: TrainingDynamicsScale, records: JobResults) -> Table:
    """The table of the models' test results and training times."""
    rows: list[list[Value]] = [
        [label, seed, f"{run['test']['bits_per_byte']:.3f}", f"{run['training_seconds']:.0f}"]
        for m, label in MEMBERSHIPS.items()
        for seed in scale.seeds
        for run in [records[key(m, seed)]]
    ]
    return Table(
        title="The models",
        columns=["membership in ψ", "seed", "test, bits per byte", "seconds of training"],
        rows=rows,
        note="`lm-ablation` has the baselines on the same test text.",
    )


EXPERIMENT = Experiment(
    name="training-dynamics",
    title="Hash functions while a language model trains",
    source="Sun, Yang, Yoo 2022, figure 4, appendix F",
    deviations=(
        "Strictly causal buckets, one score for queries and keys, bytes, and the text at hand: as in `lm-ablation`.",
        "Membership in ψ by argmax, as the paper writes it, and balanced, which does not collapse.",
        "Figures of a few fixed windows of the validation text, not of the training batches. Their utilities are from "
        "exact attention at `small`, and by random features at `paper`, as in the loss there.",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
    needs=lambda scale: [scale.corpus] if scale.corpus else [],
)
