"""Amortised clustering by Set Transformers, with the methods of this library in their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from subquad.research.papers.base import Cell, Context, Experiment, JobResults, note_on_seeds, spread
from subquad.research.papers.results import Results, Table, Value
from subquad.research.training.run import train
from subquad.research.training.settings import settings_of

BASELINES = "baselines"
FIGURE = "log_likelihood"


@dataclass(frozen=True, kw_only=True)
class SetClusteringScale:
    """The settings of the clustering of sets: what is trained.

    Attributes:
        models: "METHOD points=M": the method of the blocks on the elements, and their learned points; 0: SAB.
    """

    models: tuple[str, ...] = ("full points=32", "full points=0", "lsh points=0", "linear points=0")
    task: Mapping[str, Any]
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    seeds: tuple[int, ...] = (0,)


SCALES = {
    "smoke": SetClusteringScale(
        models=("full points=4", "lsh:buckets=4 points=0"),
        task={"smallest": 10, "largest": 20, "held_out": 8},
        model={"layers": 1, "heads": 2, "width": 16, "feed_forward": 16},
        training={"steps": 3, "batch": 4},
    ),
    "small": SetClusteringScale(
        task={"held_out": 256},
        model={"width": 64, "feed_forward": 64},
        training={"steps": 2000},
    ),
    "paper": SetClusteringScale(
        task={"held_out": 1000},
        model={"width": 128, "feed_forward": 128},
        training={"steps": 50_000},
        seeds=(0, 1, 2),
    ),
}


def key(model: str, seed: int) -> str:
    """A cell's name."""
    return f"{model} seed={seed}"


def cells(scale: SetClusteringScale) -> list[Cell]:
    """The baselines, then one trained model each."""
    fits = [Cell(key(model, seed), partial(_fit, scale, model, seed)) for seed in scale.seeds for model in scale.models]
    return [Cell(BASELINES, partial(_baselines, scale)), *fits]


def _baselines(scale: SetClusteringScale, context: Context) -> dict[str, Any]:
    task = settings_of("clusters", {"task": scale.task}).task
    return task.baselines(task.splits(None), None)


def _fit(scale: SetClusteringScale, model: str, seed: int, context: Context) -> dict[str, Any]:
    method, _, points = model.partition(" points=")
    tables = {
        "task": {**scale.task, "points": int(points)},
        "model": {**scale.model, "method": method},
        "training": {**scale.training, "seed": seed},
    }
    settings = settings_of("clusters", tables)
    outcome = train(settings, context.folder, device=context.device, progress=context.progress)
    return {"test": outcome.test, "steps": outcome.steps, "training_seconds": outcome.seconds}


def results(scale: SetClusteringScale, records: JobResults) -> Results:
    """Log-likelihoods next to the baselines, with the distance to the oracle."""
    oracle = records[BASELINES]["oracle"][FIGURE]
    rows: list[list[Value]] = [
        [name, metrics[FIGURE] - oracle, f"{metrics[FIGURE]:.3f}", None, None]
        for name, metrics in records[BASELINES].items()
    ]
    for model in scale.models:
        cells_of = [records[key(model, seed)] for seed in scale.seeds]
        reached = [cell["test"][FIGURE] for cell in cells_of]
        above = sum(reached) / len(reached) - oracle
        rows.append([model, above, spread(reached), None, spread([cell["training_seconds"] for cell in cells_of], 1)])
    table = Table(
        title="Log-likelihood of a point of held-out sets",
        columns=["model", "above the oracle", "ours", "published", "s of training"],
        rows=rows,
        note="Higher is better. The oracle knows the mixture that the points were drawn from. Expectation maximisation "
        "is fitted to the points on which it is measured, so it can exceed the oracle." + note_on_seeds(scale.seeds),
    )
    return Results(
        summary="How well a Set Transformer predicts, in one pass, which mixture of four Gaussians a set comes from.",
        tables=[table],
    )


EXPERIMENT = Experiment(
    name="set-clustering",
    title="Amortised clustering by Set Transformers",
    source="Lee et al. 2019, section 5.3",
    deviations=(
        "The published column is empty: the paper's figures are not at hand here.",
        "Blocks follow the paper's equations where the published code differs: the residual connection, the scale of "
        "the logits, and feed-forward layers of two linear ones (how-to: Functions of sets).",
        "The learning rate falls along a cosine over the run.",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
)
