"""Figure 5 of clustered attention: accuracy on masked copy, by sequence length and clusters or hashing rounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from subquad.research.papers.base import Cell, Context, Experiment, JobResults, note_on_seeds, spread
from subquad.research.papers.results import HeatMap, Results, Table
from subquad.research.training.run import train
from subquad.research.training.settings import settings_of


@dataclass(frozen=True, kw_only=True)
class CopyHeatmapScale:
    """The settings of the copy heatmap: what is trained, and for how long."""

    lengths: tuple[int, ...]  # L; the input has 2L + 2 tokens
    clusters: tuple[int, ...]
    rounds: tuple[int, ...]
    model: dict[str, Any]
    training: dict[str, Any]
    seeds: tuple[int, ...] = (0,)


PUBLISHED = {
    "full": "all solved",
    "i-clustered": "all solved",
    "clustered": "needs more clusters as N grows",
    "reformer": "needs more rounds as N grows",
}
AXES = {"full": "", "i-clustered": "clusters", "clustered": "clusters", "reformer": "rounds of hashing"}
PAPER_MODEL = {"layers": 4, "heads": 6, "width": 192, "feed_forward": 768}
SCALES = {
    "smoke": CopyHeatmapScale(
        lengths=(7,),
        clusters=(4,),
        rounds=(1,),
        model={"layers": 1, "heads": 2, "width": 32, "feed_forward": 64},
        training={"steps": 4, "batch": 4},
    ),
    "small": CopyHeatmapScale(
        lengths=(31, 63, 127),
        clusters=(15, 30, 60, 100),
        rounds=(1, 4, 8),
        model={"layers": 3, "heads": 4, "width": 64, "feed_forward": 128, "positions": "rotary"},
        training={
            "steps": 600,
            "batch": 8,
            "evaluation_batch": 32,
            "optimizer": "adamw",
            "learning_rate": 1e-3,
            "schedule": "linear",
            "warmup": 100,
            "every": 100,
            "stop_at": 0.998,
        },
    ),
    "paper": CopyHeatmapScale(
        lengths=(31, 63, 127, 255),
        clusters=(15, 30, 60, 100),
        rounds=(1, 4, 8, 16),
        model=PAPER_MODEL,
        training={"steps": 5000, "batch": 32, "learning_rate": 2e-4, "optimizer": "radam"},
        seeds=(0, 1, 2),
    ),
}


def methods(scale: CopyHeatmapScale) -> dict[str, list[str]]:
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


def cells(scale: CopyHeatmapScale) -> list[Cell]:
    """One trained model each."""
    every = [method for rows in methods(scale).values() for method in rows]
    return [
        Cell(key(method, length, seed), partial(_fit, scale, method, length, seed))
        for seed in scale.seeds
        for method in every
        for length in scale.lengths
    ]


def _fit(scale: CopyHeatmapScale, method: str, length: int, seed: int, context: Context) -> dict[str, Any]:
    tables = {
        "task": {"length": length, "seed": seed},
        "model": {**scale.model, "method": method},
        "training": {**scale.training, "seed": seed},
    }
    settings = settings_of("masked-copy", tables)
    outcome = train(settings, context.folder, device=context.device, progress=context.progress)
    return {"accuracy": outcome.test["accuracy"], "steps": outcome.steps, "training_seconds": outcome.seconds}


def results(scale: CopyHeatmapScale, records: JobResults) -> Results:
    """A heat map for each family, all accuracies in one table, and what they took."""
    sizes = [str(2 * length + 2) for length in scale.lengths]
    plots, accuracies, efforts = [], [], []
    for family, members in methods(scale).items():
        rows = [[_of_seeds(scale, records, method, length) for length in scale.lengths] for method in members]
        plots.append(
            HeatMap(
                file=f"copy-heatmap-{family}",
                title=f"accuracy of {family} on masked copy",
                x="tokens N",
                y=AXES[family],
                columns=sizes,
                rows=[method.rpartition("=")[2] for method in members],
                values=[[fmean(cell["accuracy"] for cell in cells) for cells in row] for row in rows],
                format=".3f",
            )
        )
        for method, row in zip(members, rows, strict=True):
            shown = [spread([cell["accuracy"] for cell in cells], 1, percent=True) for cells in row]
            accuracies.append([method, *shown, PUBLISHED[family]])
            efforts.append([method, *(_effort(cells) for cells in row)])
    columns = [f"N={size}" for size in sizes]
    return Results(
        summary="Masked copy: 0w0w with a fifth of the symbols masked, each of them to be read in the other half.",
        tables=[
            Table(
                title="Accuracy of the masked symbols, %",
                columns=["method", *columns, "paper"],
                rows=accuracies,
                note="The paper's figure 5 gives colours, no numbers; the last column is its text's description. "
                "A guess is right in 10 %. If there are at least as many clusters as queries, attention is exact."
                + note_on_seeds(scale.seeds),
            ),
            Table(
                title="Updates until the validation's figure was good enough, or all; seconds of training",
                columns=["method", *columns],
                rows=efforts,
            ),
        ],
        plots=plots,
    )


def _of_seeds(scale: CopyHeatmapScale, records: JobResults, method: str, length: int) -> list[dict[str, Any]]:
    return [records[key(method, length, seed)] for seed in scale.seeds]


def _effort(cells: list[dict[str, Any]]) -> str:
    """ "300, 24 s": means over the seeds."""
    steps, seconds = (fmean(cell[name] for cell in cells) for name in ("steps", "training_seconds"))
    return f"{steps:.0f}, {seconds:.0f} s"


EXPERIMENT = Experiment(
    name="copy-heatmap",
    title="Accuracy on masked copy by length and clusters",
    source="Vyas et al. 2020, figure 5, appendix C.2",
    deviations=(
        "The paper names no positions. `paper` has learned ones; `small` has rotary ones, with which the copy, a fixed "
        "distance away, is found in 200 to 400 updates of a few items.",
        "`small`: three layers, four heads of 16, N up to 256 and 1 to 8 rounds, to fit two cores in an hour. AdamW "
        "with a warm-up and a linear decay in place of RAdam at a constant rate; 600 updates of 8 items at most, fewer "
        "where 99.8 % of the validation's symbols are right.",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
)
