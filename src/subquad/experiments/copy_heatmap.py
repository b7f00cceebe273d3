"""Figure 5 of clustered attention: accuracy on masked copy, by sequence length and clusters or hashing rounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from subquad.experiments.base import Cell, Context, Experiment, Found
from subquad.report.experiment import HeatMap, Results, Table
from subquad.training.run import train
from subquad.training.settings import settings_of


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What is trained, and how long."""

    lengths: tuple[int, ...]  # L; the input has 2L + 2 tokens
    clusters: tuple[int, ...]
    rounds: tuple[int, ...]
    model: dict[str, Any]
    training: dict[str, Any]
    seeds: tuple[int, ...] = (0,)


PAPER_MODEL = {"layers": 4, "heads": 6, "width": 192, "feed_forward": 768}
SCALES = {
    "smoke": Scale(
        lengths=(7,),
        clusters=(4,),
        rounds=(1,),
        model={"layers": 1, "heads": 2, "width": 32, "feed_forward": 64},
        training={"steps": 4, "batch": 4},
    ),
    "small": Scale(
        lengths=(31, 63, 127),
        clusters=(15, 30, 60, 100),
        rounds=(1, 4, 8, 16),
        model={"layers": 2, "heads": 4, "width": 128, "feed_forward": 256},
        training={"steps": 2000, "batch": 32, "learning_rate": 1e-3},
    ),
    "paper": Scale(
        lengths=(31, 63, 127, 255),
        clusters=(15, 30, 60, 100),
        rounds=(1, 4, 8, 16),
        model=PAPER_MODEL,
        training={"steps": 5000, "batch": 32, "learning_rate": 2e-4, "optimizer": "radam"},
        seeds=(0, 1, 2),
    ),
}


def methods(scale: Scale) -> dict[str, list[str]]:
    """The rows of each map: its title, and the methods."""
    return {
        "full": ["full"],
        "i-clustered": [f"i-clustered:clusters={clusters}" for clusters in scale.clusters],
        "clustered": [f"clustered:clusters={clusters}" for clusters in scale.clusters],
        "reformer": [f"reformer:rounds={rounds}" for rounds in scale.rounds],
    }


def key(method: str, length: int, seed: int) -> str:
    """A cell's name."""
    return f"{method} N={2 * length + 2} seed={seed}"


def cells(scale: Scale) -> list[Cell]:
    """One trained model each."""
    every = [method for rows in methods(scale).values() for method in rows]
    return [
        Cell(key(method, length, seed), partial(_fit, scale, method, length, seed))
        for seed in scale.seeds
        for method in every
        for length in scale.lengths
    ]


def _fit(scale: Scale, method: str, length: int, seed: int, context: Context) -> dict[str, Any]:
    given = {
        "task": {"length": length, "seed": seed},
        "model": {**scale.model, "method": method},
        "training": {**scale.training, "seed": seed},
    }
    settings = settings_of("masked-copy", given)
    outcome = train(settings, context.folder, device=context.device, progress=context.progress)
    return {"accuracy": outcome.test["accuracy"], "steps": outcome.steps, "training_seconds": outcome.seconds}


def results(scale: Scale, found: Found) -> Results:
    """A heat map for each family, and all accuracies in one table."""
    plots, rows = [], []
    sizes = [str(2 * length + 2) for length in scale.lengths]
    for family, members in methods(scale).items():
        values = [[_mean(scale, found, method, length) for length in scale.lengths] for method in members]
        plots.append(
            HeatMap(
                file=f"accuracy-{family}",
                title=f"accuracy of {family} on masked copy",
                x="tokens N",
                y="setting",
                columns=sizes,
                rows=members,
                values=values,
            )
        )
        rows += [
            [method, *(f"{100 * value:.1f}" for value in row)] for method, row in zip(members, values, strict=True)
        ]
    table = Table(
        title="Accuracy of the masked symbols, %",
        columns=["method", *(f"N={size}" for size in sizes)],
        rows=rows,
        note="The paper's figure 5 gives colours, no numbers: full and i-clustered solve every combination, clustered "
        "and Reformer need more clusters or rounds as sequences grow. A guess is right in 10 %.",
    )
    return Results(summary="Masked copy: 0w0w with a fifth of the symbols masked.", tables=[table], plots=plots)


def _mean(scale: Scale, found: Found, method: str, length: int) -> float:
    accuracies = [found[key(method, length, seed)]["accuracy"] for seed in scale.seeds]
    return sum(accuracies) / len(accuracies)


EXPERIMENT = Experiment(
    name="copy-heatmap",
    title="Accuracy on masked copy by length and clusters",
    source="Vyas et al. 2020, figure 5, appendix C.2",
    deviations=("Learned positions: the paper names none.",),
    scales=SCALES,
    cells=cells,
    results=results,
)
