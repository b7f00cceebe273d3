"""Table 2 of Linformer: k and the sharing of projections, fine-tuned on a labelled task."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from subquad.core import checksums as seals
from subquad.methods.full import EXACT
from subquad.research.papers.at_hand import AtHand, at_hand, folders
from subquad.research.papers.base import Cell, Context, Experiment, JobResults, spread
from subquad.research.papers.encoder_fine_tuning import FineTune, head_of, texts_of
from subquad.research.papers.results import Bars, Results, Table, Value
from subquad.research.papers.text_baselines import baselines
from subquad.research.training.checkpoints import discard_all
from subquad.research.training.run import evaluate, train
from subquad.research.training.settings import ModelSettings, RunSettings, TrainingSettings
from subquad.tools.compare.labelled_tasks import Probe

SHARINGS = {"headwise": "", "key-value": ", shared kv", "layerwise": ", shared kv, layer"}  # ours -> the paper's
# Table 2, n = 512: RoBERTa-base and Linformers, accuracy in %
PUBLISHED = {
    EXACT: {"SST-2": 93.1, "IMDB": 94.1, "QNLI": 90.9, "QQP": 90.9},
    "128": {"SST-2": 92.4, "IMDB": 94.0, "QNLI": 90.4, "QQP": 90.2},
    "128, shared kv": {"SST-2": 93.4, "IMDB": 93.4, "QNLI": 90.3, "QQP": 90.3},
    "128, shared kv, layer": {"SST-2": 93.2, "IMDB": 93.8, "QNLI": 90.1, "QQP": 90.2},
    "256": {"SST-2": 93.2, "IMDB": 94.0, "QNLI": 90.6, "QQP": 90.5},
    "256, shared kv": {"SST-2": 93.3, "IMDB": 93.6, "QNLI": 90.6, "QQP": 90.6},
    "256, shared kv, layer": {"SST-2": 93.1, "IMDB": 94.1, "QNLI": 91.2, "QQP": 90.8},
}


@dataclass(frozen=True, kw_only=True)
class LinformerQualityScale:
    """The settings of the experiment on Linformer's quality: what is fine-tuned, and on what.

    Attributes:
        model: hub id or folder of an encoder; "": the encoder of the extra `demo`.
        task: a task of `subquad compare --task` that has labels.
        examples: training and test texts together, sampled at random; 0: all.
        learn: training texts of those that are used, evenly spaced; 0: all.
        length: n, tokens of a text that are read.
        k: projected keys and values.
        epochs: passes over the training texts.
    """

    model: str = ""
    task: str = "movie-reviews"
    examples: int = 0
    learn: int = 0
    length: int = 512
    k: tuple[int, ...] = (128, 256)
    sharings: tuple[str, ...] = tuple(SHARINGS)
    epochs: float = 3.0
    training: dict[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)


BATCH = 16
HEAD = "head.pt"
SCALES = {
    "smoke": LinformerQualityScale(
        model="random",
        task="labelled",
        length=48,
        k=(8,),
        sharings=("key-value", "layerwise"),
        epochs=0.5,
        training={"batch": 8, "learning_rate": 1e-3},
    ),
    "small": LinformerQualityScale(
        examples=500,
        length=256,
        k=(64, 128),
        epochs=0.5,
        training={"batch": 8, "learning_rate": 5e-5, "warmup": 4, "precision": "bf16"},
    ),
    "paper": LinformerQualityScale(training={"batch": BATCH, "learning_rate": 5e-5, "warmup": 30}, seeds=(0, 1, 2)),
}


def methods(scale: LinformerQualityScale) -> list[str]:
    """Exact attention, and Linformer with each k and sharing."""
    return [EXACT, *(f"linformer:k={k},sharing={sharing}" for k in scale.k for sharing in scale.sharings)]


BASELINES = "baselines"  # the cell that leaves the head that fine-tuning starts from


def key(method: str, seed: int) -> str:
    """A cell's name."""
    return f"{method} seed={seed}"


def cells(scale: LinformerQualityScale) -> list[Cell]:
    """The baselines, then one fine-tuned model each."""
    named = [
        (key(method, seed), partial(_tune, scale, method, seed)) for seed in scale.seeds for method in methods(scale)
    ]
    return [Cell(BASELINES, partial(_baselines, scale)), *(Cell(name, run, (BASELINES,)) for name, run in named)]


def _baselines(scale: LinformerQualityScale, context: Context) -> dict[str, Any]:
    at = at_hand(scale.model, context)
    pretrained, task = at.load(context.device), texts_of(scale.task, at.data, scale.examples, scale.learn)
    items = [pretrained.wrap(pretrained.content_ids(text), scale.length) for text in task.texts]
    sizes = {"train": task.train, "test": len(items) - task.train, "classes": len(set(task.labels))}
    plain = baselines(pretrained, task, items)
    context.progress("embeddings", 0, 1)
    probe = Probe(pretrained.embed_all(items[: task.train]), task.labels[: task.train])
    seals.save(context.folder / HEAD, head_of(probe))
    return {"sizes": sizes, "accuracy": plain}


def run_settings(scale: LinformerQualityScale, at: AtHand, head: Path, method: str, seed: int) -> RunSettings:
    """The settings of one run."""
    task = texts_of(scale.task, at.data, scale.examples, scale.learn)
    settings = FineTune(
        encoder=at.model or "",
        texts=scale.task,
        examples=scale.examples,
        learn=scale.learn,
        length=scale.length,
        classes=len(set(task.labels)),
        head=str(head),
    )
    learnt = task.train - len(range(0, task.train, settings.held_out))
    options: dict[str, Any] = {"batch": BATCH, "keep": "last", "seed": seed} | scale.training
    steps = max(1, round(scale.epochs * learnt / options["batch"]))
    return RunSettings(
        task=settings, model=ModelSettings(method=method), training=TrainingSettings(steps=steps, **options)
    )


def _tune(scale: LinformerQualityScale, method: str, seed: int, context: Context) -> dict[str, Any]:
    at = at_hand(scale.model, context)
    settings = run_settings(scale, at, context.beside(BASELINES) / HEAD, method, seed)
    start = settings.task.model(settings.model).to(context.device)
    before = evaluate(settings, start, context.folder / "start", data=at.data, device=context.device)
    outcome = train(settings, context.folder, data=at.data, device=context.device, progress=context.progress)
    losses = [entry["loss"] for entry in outcome.history if "loss" in entry]
    discard_all(context.folder)  # a quarter of a gigabyte each, and what they gave is kept
    return {
        "accuracy": outcome.test["accuracy"],
        "before": before["accuracy"],
        "loss": losses[-1] if losses else None,
        "steps": outcome.steps,
        "training_seconds": outcome.seconds,
    }


# ---------------------------------------------------------------------- what comes out


def published_name(scale: LinformerQualityScale, method: str) -> str:
    """The row of the paper's table with the same share k/n of projected tokens, and the same sharing."""
    if method == EXACT:
        return EXACT
    k, _, sharing = method.removeprefix("linformer:k=").partition(",sharing=")
    return f"{int(k) * 512 // scale.length}{SHARINGS.get(sharing, f', {sharing}')}"


def results(scale: LinformerQualityScale, records: JobResults) -> Results:
    """Ours next to the published accuracies."""
    sizes, plain = records[BASELINES]["sizes"], records[BASELINES]["accuracy"]
    means = {m: _mean(scale, records, m) for m in methods(scale)}
    body: list[list[Value]] = [[name, None, f"{100 * accuracy:.1f}", *[None] * 7] for name, accuracy in plain.items()]
    for method in methods(scale):
        runs = [records[key(method, seed)] for seed in scale.seeds]
        its = PUBLISHED.get(published_name(scale, method), {})
        shown = [its.get("IMDB"), its["IMDB"] - PUBLISHED[EXACT]["IMDB"] if its else None, its.get("SST-2")]
        body.append(
            [
                method,
                spread([run["before"] for run in runs], 1, percent=True),
                spread([run["accuracy"] for run in runs], 1, percent=True),
                f"{100 * (means[method] - means[EXACT]):+.1f}",
                f"{runs[0]['loss']:.3f}" if runs[0]["loss"] is not None else None,
                f"{sum(run['training_seconds'] for run in runs) / len(runs):.0f}",
                *(None if value is None else f"{value:.1f}" for value in shown),
                None if method == EXACT else published_name(scale, method),
            ]
        )
    columns = [
        "model",
        "before, %",
        "accuracy, %",
        "to exact",
        "loss",
        "s training",
        "IMDB",
        "to exact",
        "SST-2",
        "paper's row",
    ]
    error = 100 * (means[EXACT] * (1 - means[EXACT]) / sizes["test"]) ** 0.5
    table = Table(
        title=f"{scale.task}: accuracy after fine-tuning",
        columns=columns,
        rows=body,
        note=f"{sizes['train']} training texts, {sizes['test']} test texts of at most {scale.length} tokens; the "
        f"standard error of one accuracy is about {error:.1f} points. Before: with the exact model's probe as its "
        "head, and nothing fine-tuned. Loss: of the last steps of training. The last four columns are the paper's: "
        "Linformers that were pretrained as such, n = 512, all of IMDB's 25,000 training reviews.",
    )
    plot = Bars(
        file="linformer-accuracy",
        title=f"{scale.task}, by k; kv: E = F; layer: one for all layers",
        y="accuracy, %",
        groups=[_short(m) for m in methods(scale)],
        series={
            "before fine-tuning": [100 * _mean(scale, records, m, "before") for m in methods(scale)],
            "after": [100 * means[m] for m in methods(scale)],
        },
        levels={name: 100 * accuracy for name, accuracy in plain.items()},
    )
    return Results(
        summary="A pretrained encoder with a linear head is fine-tuned with exact attention, and in the same way with "
        "Linformer's projections in place of it.",
        tables=[table],
        plots=[plot],
    )


def _short(method: str) -> str:
    k, _, sharing = method.removeprefix("linformer:k=").partition(",sharing=")
    return {"headwise": k, "key-value": f"{k} kv", "layerwise": f"{k} kv layer"}.get(sharing, method)


def _mean(scale: LinformerQualityScale, records: JobResults, method: str, figure: str = "accuracy") -> float:
    accuracies = [records[key(method, seed)][figure] for seed in scale.seeds]
    return float(sum(accuracies) / len(accuracies))


EXPERIMENT = Experiment(
    name="linformer-quality",
    title="Linformer's k and sharing, fine-tuned on a labelled task",
    source="Wang et al. 2020, table 2",
    deviations=(
        "Projections are put into an encoder that was pretrained with exact attention, where the paper pretrains "
        "every Linformer with the masked language model first. They start as means of segments, with the first and "
        "the last token exact (start=pool, ends=exact), and all weights learn.",
        "NLTK's 2,000 movie reviews in place of IMDB, SST-2, QNLI and QQP, whose data is not at hand; any labelled "
        "task can be given (setting `task`).",
        "The head starts as a logistic probe on the exact model's embeddings, the same for all rows: from a random "
        "head so few steps on so few reviews learn nothing.",
        "At `small` a part of the reviews, 256 tokens, k at the paper's shares 1/4 and 1/2 of them, one seed and bf16: "
        "what two cores fine-tune in minutes.",
    ),
    needs=lambda scale: folders(scale.model, [scale.task]),
    scales=SCALES,
    cells=cells,
    results=results,
)
