"""Table 4 of clustered attention and table 2 of LHA: a trained model whose attention is replaced, nothing retrained."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.core import checksums as seals
from subquad.methods import parse_method
from subquad.methods.full import EXACT
from subquad.research.papers.at_hand import AtHand, at_hand, calibrate, calibrated_row, folders
from subquad.research.papers.base import AGAIN, Cell, Context, Experiment, JobResults, spread
from subquad.research.papers.results import HeatMap, Results, Table, Value
from subquad.research.papers.text_baselines import baselines
from subquad.tools.compare.labelled_tasks import LabelledTask, Probe, load_task, share_right
from subquad.tools.measure.fidelity import cosine
from subquad.tools.models.compare_rows import row_of
from subquad.tools.models.pretrained import Pretrained, running

GLUE = ("CoLA", "MNLI", "MRPC", "QNLI", "QQP", "RTE", "SST-2", "STS-B")
# Clustered attention, table 4 (25 clusters), and LHA, table 2 (C keys a cluster), both with RoBERTa-base, in points.
PUBLISHED_EXACT = {
    "Vyas et al. 2020": (60.1, 88.0, 86.8, 92.9, 91.5, 68.2, 94.7, 90.0),
    "Sun et al. 2022": (60.9, 87.6, 88.7, 92.7, 91.6, 68.5, 94.5, 90.0),
}
PUBLISHED = {
    "clustered-25": ("Vyas et al. 2020", (59.8, 79.4, 43.6, 74.6, 89.4, 49.8, 94.4, 78.9)),
    "i-clustered-25": ("Vyas et al. 2020", (60.1, 88.0, 87.3, 93.0, 91.5, 70.4, 94.7, 90.0)),
    "SMYRF, 2 rounds, C=16": ("Sun et al. 2022", (58.9, 82.3, 85.7, 89.5, 89.3, 64.5, 93.1, 87.8)),
    "SMYRF, 2 rounds, C=32": ("Sun et al. 2022", (58.8, 85.0, 87.7, 91.1, 89.7, 68.6, 93.2, 89.7)),
    "LSH, C=11": ("Sun et al. 2022", (61.5, 86.3, 88.7, 91.1, 90.2, 68.0, 93.3, 88.5)),
    "LSH, C=22": ("Sun et al. 2022", (61.5, 86.8, 89.7, 91.9, 90.8, 68.4, 93.9, 88.7)),
    "LSH, C=45": ("Sun et al. 2022", (61.8, 87.5, 88.7, 92.7, 91.2, 68.1, 94.0, 89.4)),
    "LHA, C=11": ("Sun et al. 2022", (61.2, 85.7, 89.1, 91.3, 90.5, 68.0, 93.7, 89.0)),
    "LHA, C=22": ("Sun et al. 2022", (62.0, 86.8, 88.0, 92.4, 91.1, 68.6, 94.8, 89.6)),
    "LHA, C=45": ("Sun et al. 2022", (62.3, 87.7, 89.1, 92.8, 91.4, 68.5, 94.6, 89.5)),
}
SIZES = {8: 11, 16: 22, 32: 45}  # tokens of a bucket before the paper's √2, and with it: C
LSH = tuple(f"lsh:buckets=0,bucket_size={size}" for size in SIZES)
LHA = tuple(f"lha:buckets=0,bucket_size={size}" for size in SIZES)
COUNTERPARTS = {  # our row -> the published one; "calibrated" means that the row has learned parameters
    "clustered:clusters=25": "clustered-25",
    "i-clustered:clusters=25,topk=32": "i-clustered-25",
    "smyrf:cluster_size=16": "SMYRF, 2 rounds, C=16",
    "smyrf:cluster_size=32": "SMYRF, 2 rounds, C=32",
    **{method: f"LSH, C={size}" for method, size in zip(LSH, SIZES.values(), strict=True)},
    **{f"{method} calibrated": f"LHA, C={size}" for method, size in zip(LHA, SIZES.values(), strict=True)},
}
NO_ATTENTION = "linformer:projection=mean-pool,ends=pooled,k=1"  # every token gets the mean of all values


@dataclass(frozen=True, kw_only=True)
class PretrainedApproximationScale:
    """The model, its tasks, and the methods that are put into it.

    Attributes:
        model: hub id or folder of an embedding model; "": the encoder of the extra `demo`.
        tasks: names of tasks, as in `subquad compare --task`; "labelled" are tables of your own.
        examples: number for each task, training and test together, sampled at random; 0: all.
        length: tokens of a text that are read.
        methods: methods that run as they are.
        fits: methods whose learned parameters are calibrated first, on `text` under the data folder.
        steps: calibration steps; 0: the method's own recipe.
        seeds: seeds of methods that depend on one.
    """

    model: str = ""
    tasks: tuple[str, ...] = ("banking77", "movie-reviews")
    examples: tuple[int, ...] = (0, 0)
    length: int = 512
    methods: tuple[str, ...] = (
        NO_ATTENTION,
        "clustered:clusters=25",
        "i-clustered:clusters=25,topk=32",
        *LSH,
        "smyrf:cluster_size=16",
        "smyrf:cluster_size=32",
        "lha-tail",
    )
    fits: tuple[str, ...] = (*LHA, "lha-tail")
    text: tuple[str, ...] = ("wikitext-2/test.txt",)
    steps: int = 0
    seeds: tuple[int, ...] = (0,)


SCALES = {
    "smoke": PretrainedApproximationScale(
        model="random",
        tasks=("labelled",),
        examples=(0,),
        length=48,
        methods=("clustered:clusters=4", "lsh:buckets=4"),
        fits=("lha:buckets=4",),
        text=("fit.txt",),
        steps=2,
    ),
    "small": PretrainedApproximationScale(examples=(1500, 400), steps=75),
    "paper": PretrainedApproximationScale(seeds=(0, 1, 2)),
}


@dataclass(frozen=True)
class Replacement:
    """One line of the tables: a method by itself, or with calibrated parameters."""

    method: str
    calibrated: bool = False

    @property
    def label(self) -> str:
        """The name in the tables."""
        return f"{self.method} calibrated" if self.calibrated else self.method


def rows(scale: PretrainedApproximationScale) -> list[Replacement]:
    """All of them but exact attention."""
    return [*(Replacement(method) for method in scale.methods), *(Replacement(method, True) for method in scale.fits)]


def seeds(scale: PretrainedApproximationScale, row: Replacement) -> tuple[int, ...]:
    """One run where nothing is drawn; of calibrated methods too, because each would have to be calibrated."""
    stochastic = parse_method(row.method).traits.stochastic and not row.calibrated
    return scale.seeds if stochastic else scale.seeds[:1]


def key(task: str, label: str, seed: int = 0) -> str:
    """A cell's name."""
    return f"{task} {label}" + (f" seed={seed}" if seed else "")


def cells(scale: PretrainedApproximationScale) -> list[Cell]:
    """Exact attention and the baselines of each task first: the others read what they leave."""
    exact = [Cell(key(task, EXACT), partial(_exact, scale, task)) for task in scale.tasks]
    plain = [Cell(key(task, "baselines"), partial(_baselines, scale, task)) for task in scale.tasks]
    fits = [Cell(f"fit {method}", partial(_fit, scale, method)) for method in scale.fits]
    replaced = [
        Cell(key(task, row.label, seed), partial(_replaced, scale, task, row, seed), _reads(task, row))
        for task in scale.tasks
        for row in rows(scale)
        for seed in seeds(scale, row)
    ]
    return [*exact, *plain, *fits, *replaced]


def _reads(task: str, row: Replacement) -> tuple[str, ...]:
    """The cells whose folders a replacement reads."""
    return key(task, EXACT), *([f"fit {row.method}"] if row.calibrated else [])


# ---------------------------------------------------------------------- one cell


def _task(scale: PretrainedApproximationScale, name: str, at: AtHand) -> LabelledTask:
    return load_task(name, at.data, scale.examples[scale.tasks.index(name)] or None)


def _items(scale: PretrainedApproximationScale, pretrained: Pretrained, texts: Sequence[str]) -> list[list[int]]:
    return [pretrained.wrap(pretrained.content_ids(text), scale.length) for text in texts]


def _fit(scale: PretrainedApproximationScale, method: str, context: Context) -> dict[str, Any]:
    at = at_hand(scale.model, context)
    return calibrate(at, method, scale.text, context, steps=scale.steps, length=scale.length)


def _baselines(scale: PretrainedApproximationScale, name: str, context: Context) -> dict[str, Any]:
    at = at_hand(scale.model, context)
    pretrained, task = at.load(context.device), _task(scale, name, at)
    if not task.labels:
        return {}
    return baselines(pretrained, task, _items(scale, pretrained, task.texts))


def _exact(scale: PretrainedApproximationScale, name: str, context: Context) -> dict[str, Any]:
    """Embeddings of all texts, kept for the other cells: the probe learns from those of the training texts."""
    at = at_hand(scale.model, context)
    pretrained, task = at.load(context.device), _task(scale, name, at)
    items = _items(scale, pretrained, task.texts)
    context.progress("training texts", 0, 2)
    learnt = pretrained.embed_all(items[: task.train]) if task.train else torch.empty(0)
    context.progress("test texts", 1, 2)
    held = pretrained.embed_all(items[task.train :])
    seals.save(context.folder / "vectors.pt", {"train": learnt, "test": held})
    lengths = [len(item) for item in items]
    sizes = {"train": task.train, "test": len(held), "tokens": statistics.median(lengths)}
    return _judged(task, learnt, held, held) | sizes


def _replaced(
    scale: PretrainedApproximationScale, name: str, row: Replacement, seed: int, context: Context
) -> dict[str, Any]:
    """The test texts with a method in the model; probe and training texts are those of exact attention."""
    at = at_hand(scale.model, context)
    pretrained, task = at.load(context.device), _task(scale, name, at)
    if row.calibrated:
        fitted_row = calibrated_row(pretrained, f"fit {row.method}", context)
    else:
        settings = f"{':' if ':' not in row.method else ','}seed={seed}" if seed else ""
        fitted_row = row_of(pretrained, parse_method(row.method + settings))
    if not fitted_row.layers:
        return {"reason": fitted_row.reason}
    items = _items(scale, pretrained, task.texts[task.train :])
    with running(pretrained.model, fitted_row.swap):
        vectors = pretrained.embed_all(items)
    kept = seals.load(context.beside(key(name, EXACT)) / "vectors.pt", AGAIN)
    return _judged(task, kept["train"], kept["test"], vectors)


def _judged(task: LabelledTask, learnt: Tensor, exact: Tensor, vectors: Tensor) -> dict[str, Any]:
    """The score, how like exact attention's it is; of a task with labels, which of the test texts are right."""
    metrics: dict[str, Any] = {"cosine": float(cosine(vectors, exact).mean())}
    if not task.labels:
        return metrics | {"score": next(iter(task.score(vectors).values()))}
    probe, held = Probe(learnt, task.labels[: task.train]), task.labels[task.train :]
    answers, before = probe.predict(vectors), probe.predict(exact)
    right = [int(mine == label) for mine, label in zip(answers, held, strict=True)]
    return metrics | {"score": share_right(answers, held), "same": share_right(answers, before), "right": right}


# ---------------------------------------------------------------------- what comes out


def change(right: Sequence[Sequence[int]], exact: Sequence[int]) -> tuple[float, float]:
    """Points of accuracy that are gained or lost on the same texts, mean over the runs, and the standard error."""
    gains = [statistics.fmean(runs) - before for *runs, before in zip(*right, exact, strict=True)]
    return 100 * statistics.fmean(gains), 100 * statistics.pstdev(gains) / len(gains) ** 0.5


def published_change(name: str) -> dict[str, float]:
    """Points gained or lost against exact attention in the same table, for each task of GLUE."""
    source, published = PUBLISHED[name]
    return {task: mine - its for task, mine, its in zip(GLUE, published, PUBLISHED_EXACT[source], strict=True)}


def results(scale: PretrainedApproximationScale, records: JobResults) -> Results:
    """A table for each task, the published one, what calibration did; a map of how near all stay."""
    tables = [_table(scale, records, task) for task in scale.tasks]
    fits: list[list[Value]] = [
        [method, result["metric"], result["start"], result["kept"], result["steps"], f"{result['seconds']:.0f} s"]
        for method in scale.fits
        for result in [records[f"fit {method}"]]
    ]
    columns = ["method", "figure", "at the start", "kept", "steps", "time"]
    note = (
        'Means over layers, on held-out passages. "utility": share of exact attention on N/B chosen keys. '
        '"error": relative error of the outputs.'
    )
    tables += [Table(title="Calibration", columns=columns, rows=fits, note=note), published()]
    return Results(
        summary="A pretrained encoder reads labelled texts with its attention replaced. Neither the model nor the "
        "probe, a logistic regression on the exact model's embeddings of the training texts, learns anything new.",
        tables=tables,
        plots=[_plot(scale, records)],
    )


def _runs(
    scale: PretrainedApproximationScale, records: JobResults, task: str, row: Replacement
) -> list[dict[str, Any]]:
    return [records[key(task, row.label, seed)] for seed in seeds(scale, row)]


def _table(scale: PretrainedApproximationScale, records: JobResults, task: str) -> Table:
    exact, plain = records[key(task, EXACT)], records[key(task, "baselines")]
    body: list[list[Value]] = [[name, f"{100 * score:.1f}", *[None] * 5] for name, score in plain.items()]
    body.append([f"{EXACT} (exact)", f"{100 * exact['score']:.1f}", "0", "100.0", "1.000", "0", "0"])
    for row in rows(scale):
        runs = _runs(scale, records, task, row)
        if "reason" in runs[0]:
            body.append([row.label, f"refused: {runs[0]['reason']}", *[None] * 5])
            continue
        score = spread([run["score"] for run in runs], 1, percent=True)
        body.append([row.label, score, *_against(runs, exact), *_published(row.label)])
    columns = ["method", "score, %", "change, points", "same answers, %", "cosine", "GLUE, mean", "SST-2"]
    note = (
        f"{exact['test']} test texts of {exact['tokens']:.0f} tokens in the median (at most {scale.length}), probe of "
        f"{exact['train']} training texts. Change: against exact attention on the same texts, ± its standard error. "
        "The last two columns are published changes against exact attention, in points, on other tasks with another "
        "model, at 128 tokens at most. Time is not taken here: `subquad compare` measures it."
    )
    return Table(title=task, columns=columns, rows=body, note=note)


def _against(runs: Sequence[Mapping[str, Any]], exact: Mapping[str, Any]) -> list[Value]:
    near = f"{statistics.fmean(run['cosine'] for run in runs):.3f}"
    if "right" not in exact:
        return [f"{100 * (statistics.fmean(run['score'] for run in runs) - exact['score']):+.1f}", None, near]
    mean, error = change([run["right"] for run in runs], exact["right"])
    return [f"{mean:+.1f} ± {error:.1f}", f"{100 * statistics.fmean(run['same'] for run in runs):.1f}", near]


def _published(label: str) -> list[Value]:
    if label not in COUNTERPARTS:
        return [None, None]
    changes = published_change(COUNTERPARTS[label])
    return [f"{statistics.fmean(changes.values()):+.1f}", f"{changes['SST-2']:+.1f}"]


def published() -> Table:
    """Both papers' tables as changes against the exact model of the same table."""
    body: list[list[Value]] = []
    for name, (source, _) in PUBLISHED.items():
        changes = published_change(name)
        mean = f"{statistics.fmean(changes.values()):+.1f}"
        body.append([name, source, *(f"{changes[task]:+.1f}" for task in GLUE), mean])
    note = (
        "RoBERTa-base fine-tuned to each task, with its attention replaced; 128 tokens at most. Accuracy; Pearson "
        "correlation for STS-B."
    )
    columns = ["method", "source", *GLUE, "mean"]
    return Table(title="Published: points gained or lost on GLUE", columns=columns, rows=body, note=note)


def _plot(scale: PretrainedApproximationScale, records: JobResults) -> HeatMap:
    """The heat map of each method's closeness to exact attention: for each task, cosine and share of equal answers."""
    shown_columns = [
        (task, name) for task in scale.tasks for name in ("cosine", "same") if name in records[key(task, EXACT)]
    ]
    labels = {"cosine": "cosine", "same": "same answers"}
    values = [
        [_mean_of([run.get(name) for run in _runs(scale, records, task, row)]) for task, name in shown_columns]
        for row in rows(scale)
    ]
    return HeatMap(
        file="pretrained-nearness",
        title="how near to exact attention",
        x="",
        y="",
        columns=[f"{task}: {labels[name]}" for task, name in shown_columns],
        rows=[row.label for row in rows(scale)],
        values=values,
    )


def _mean_of(values: Sequence[float | None]) -> float | None:
    """None where a method was refused."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


EXPERIMENT = Experiment(
    name="pretrained-approximation",
    title="A pretrained model with its attention replaced",
    source="Vyas et al. 2020, table 4; Sun, Yang, Yoo 2022, table 2",
    deviations=(
        "GLUE and SQuAD were not available offline, so two other tasks are used: customer questions (banking77), most "
        "of at most 25 tokens, where clustered attention has a cluster for each query and is exact, and movie "
        "reviews cut at 512 tokens, four times the papers' length.",
        "A small encoder with a logistic probe on its frozen embeddings, in place of RoBERTa-base fine-tuned to each "
        "task: nothing is fine-tuned here. Any embedding model can be given (setting `model`).",
        "Hash functions of LHA are fitted to the frozen model on plain text with the paper's loss, by themselves and "
        "for the steps in the settings; the paper says of them only that the approximated model is RoBERTa.",
        "C = 11, 22 and 45 are the papers' numbers of keys (8, 16 and 32 times √2); at 512 tokens they are a fourth of "
        "the share that they are at 128.",
    ),
    needs=lambda scale: folders(scale.model, scale.tasks, scale.text if scale.fits else ()),
    scales=SCALES,
    cells=cells,
    results=results,
)
