"""Table 1 of LHA: language models with local, LSH and LHA heads, in all or half of the heads and layers."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from subquad.core.spelling import instead
from subquad.research.papers.base import Cell, Context, Experiment, JobResults, note_on_seeds, spread
from subquad.research.papers.made_text import made_text
from subquad.research.papers.results import Lines, Results, Table, Value
from subquad.research.training.run import train
from subquad.research.training.settings import settings_of


class Ablation(NamedTuple):
    """A row of the table: which heads and layers are not local, what hashes there, and the published perplexity.

    If there is no hash, `hash` is "–" with the attention's name behind it.
    """

    name: str
    family: str
    heads: str  # the heads that are not local: "none", "all" or "half"
    layers: str  # the layers with such heads: "none", "all", or the "upper" half
    hash: str
    published: float | None  # per word, validation data
    published_test: float | None = None
    wide: bool = False


# Systems that the paper discusses without a figure for this table, in all heads and layers.
PATTERNS = {
    "strided": "strided:stride={size}",
    "fixed": "fixed:block={size},columns=4",
    "BigBird": "bigbird:block={block},random=1",
    "Longformer": "longformer:window={last},first=1",
    "LogSparse": "logsparse:window={last}",
}
OF_ALL_KEYS = {
    "Synthesizer": "synthesizer:logits=dense",
    "linear": "linear",
    "Performer": "performer:features=64",
}

ROWS = (
    Ablation("exact attention", "exact", "all", "all", "–", None),
    Ablation("exact attention, relative positions", "exact", "all", "all", "– (relative)", None),
    Ablation("local, wide", "local", "none", "none", "–", 22.89, wide=True),
    Ablation("local", "local", "none", "none", "–", 23.82),
    Ablation("LSH, all heads, all layers", "LSH", "all", "all", "random linear", 24.64),
    Ablation("LSH, half, all layers", "LSH", "half", "all", "random linear", 23.51),
    Ablation("LSH, all heads, upper layers", "LSH", "all", "upper", "random linear", 23.76),
    Ablation("LSH, half, upper layers", "LSH", "half", "upper", "random linear", 23.53),
    Ablation("(a) random", "LHA", "all", "all", "random", 26.05),
    Ablation("(b) linear", "LHA", "all", "all", "linear", 24.22),
    Ablation("(c) MLP", "LHA", "all", "all", "MLP", 24.00),
    Ablation("(d) MLP, half", "LHA", "half", "all", "MLP", 22.79, 23.2),
    Ablation("(e) MLP, upper layers", "LHA", "all", "upper", "MLP", 23.00),
    Ablation("(f) MLP, half, upper layers", "LHA", "half", "upper", "MLP", 22.84),
    *(Ablation(name, "pattern", "all", "all", f"– ({name})", None) for name in PATTERNS),
    *(Ablation(name, "all keys", "all", "all", f"– ({name})", None) for name in OF_ALL_KEYS),
)
TRANSFORMER_XL = "Transformer-XL, local attention of 640, as quoted there: 23.09 (validation) and 24.0 (test)"
NON_LOCAL = {  # by the table's hash function; {buckets} of N / size tokens each; {last} keys and the token itself
    "–": "full",
    "– (relative)": "local:window={whole},positions=relative",
    **{f"– ({name})": method for name, method in (PATTERNS | OF_ALL_KEYS).items()},
    "random linear": "lsh:buckets={buckets},selection=argmax",
    "random": "lsh:buckets={buckets},hash=random,selection=argmax",
    "linear": "lha:buckets={buckets},hash=linear,selection=argmax,targets={targets}",
    "MLP": "lha:buckets={buckets},hash=mlp,selection=argmax,targets={targets}",
}


@dataclass(frozen=True, kw_only=True)
class LmAblationScale:
    """The settings of the language-model ablation: what is trained, and for how long.

    `size` is that of windows and of buckets, `wide` that of the wide windows.
    """

    corpus: str  # a folder of the data; "": some made text
    length: int
    size: int
    wide: int
    model: dict[str, Any]
    training: dict[str, Any]
    targets: str = "exact"
    limit: int = 0
    rows: tuple[str, ...] = tuple(row.name for row in ROWS)
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("rows must name at least one")
        names = [row.name for row in ROWS]
        for name in self.rows:
            if name not in names:
                raise ValueError(f"rows: no row {name!r}{instead(name, names, '')}")


SCALES = {
    "smoke": LmAblationScale(
        corpus="",
        length=32,
        size=8,
        wide=16,
        model={"layers": 2, "heads": 2, "width": 16, "feed_forward": 32},
        training={"steps": 3, "batch": 2},
        rows=("local", "LSH, half, upper layers", "(d) MLP, half", "BigBird"),
    ),
    "small": LmAblationScale(
        corpus="wikitext-2",
        length=128,
        size=32,
        wide=64,
        model={"layers": 2, "heads": 4, "width": 64, "feed_forward": 256, "dropout": 0.0},
        training={"steps": 300, "batch": 8, "learning_rate": 3e-3, "warmup": 30, "schedule": "cosine"},
        limit=50_000,
        seeds=(0, 1),
    ),
    "paper": LmAblationScale(
        corpus="wikitext-103",
        length=1536,
        size=384,
        wide=768,
        model={"layers": 16, "heads": 10, "width": 410, "feed_forward": 2100, "dropout": 0.2},
        training={
            "steps": 20_000,
            "batch": 32,
            "learning_rate": 3.5e-4,
            "warmup": 2000,
            "schedule": "cosine",
            "every": 2000,
        },
        targets="features",
        seeds=(0, 1, 2),
    ),
}


def methods(scale: LmAblationScale, row: Ablation) -> list[str]:
    """The attention of each layer: local ones below, and on top of them those with the row's heads."""
    layers, local = scale.model["layers"], _local(scale.wide if row.wide else scale.size)
    above = {"none": 0, "all": layers, "upper": layers // 2}[row.layers]
    sizes = {"buckets": scale.length // scale.size, "whole": scale.length - 1, "targets": scale.targets}
    sizes |= {"size": scale.size, "block": scale.size // 2, "last": scale.size - 1}
    other = NON_LOCAL[row.hash].format(**sizes)
    mixed = f"mixed-heads:methods={local}+{other}"
    name, _, settings = mixed.partition(":")
    half = f"{name}:{settings.replace(',', ';')}"
    return [local] * (layers - above) + [half if row.heads == "half" else other] * above


def _local(size: int) -> str:
    """A query sees itself and the size − 1 keys before it, with Transformer-XL's relative positions."""
    return f"local:window={size - 1},positions=relative"


def rows_of(scale: LmAblationScale) -> list[Ablation]:
    """The rows of a scale."""
    return [row for row in ROWS if row.name in scale.rows]


def key(name: str, seed: int) -> str:
    """A cell's name."""
    return f"{name} seed={seed}"


def cells(scale: LmAblationScale) -> list[Cell]:
    """The baselines, then one trained model each."""
    fits = [
        Cell(key(row.name, seed), partial(_fit, scale, row, seed)) for seed in scale.seeds for row in rows_of(scale)
    ]
    return [Cell("baselines", partial(_baselines, scale)), *fits]


def _task(scale: LmAblationScale, context: Context) -> dict[str, Any]:
    """The settings of the task; at the smoke scale with a made text."""
    task = {"length": scale.length, "limit": scale.limit}
    if scale.corpus:
        return {**task, "corpus": scale.corpus}
    return {**task, "files": str(made_text(context.folder))}


def _baselines(scale: LmAblationScale, context: Context) -> dict[str, Any]:
    task = settings_of("lm", {"task": _task(scale, context)}).task
    return task.baselines(task.splits(context.data), context.data)


def _fit(scale: LmAblationScale, row: Ablation, seed: int, context: Context) -> dict[str, Any]:
    model = {**scale.model, "method": methods(scale, row), "positions": "layer-sinusoidal"}
    tables = {
        "task": {**_task(scale, context), "seed": seed},
        "model": model,
        "training": {**scale.training, "seed": seed},
    }
    outcome = train(
        settings_of("lm", tables), context.folder, data=context.data, device=context.device, progress=context.progress
    )
    return {
        "validation": outcome.validation,
        "test": outcome.test,
        "parameters": outcome.model.num_parameters(),
        "steps": outcome.steps,
        "training_seconds": outcome.seconds,
    }


def results(scale: LmAblationScale, records: JobResults) -> Results:
    """The table of our and the published perplexities, the baselines, and the differences."""
    rows = rows_of(scale)
    lines = [_line(scale, row, records) for row in rows]
    columns = ["", "non-local heads", "layers", "hash", "size", "published PPL"]
    columns += ["validation, bits per byte", "test, bits per byte", "test PPL per word", "ms per step"]
    table = Table(
        title="Language models with local, random-hash and learned-hash heads",
        columns=columns,
        rows=lines,
        note=f"Published: perplexity per word on WikiText-103's validation data; (d) has 23.2 on its test data. "
        f"{TRANSFORMER_XL}. {_agreement(scale, rows, records)}{_noise(scale, rows, records)}"
        f"{note_on_seeds(scale.seeds)}",
    )
    points = {
        family: [(row.published, _mean(scale, row, records)) for row in rows if row.family == family and row.published]
        for family in ("local", "LSH", "LHA")
    }
    plot = Lines(
        file="lm-ablation-published-and-ours",
        title="published perplexity and ours",
        x="published, perplexity per word (validation)",
        y="ours, bits per byte (test)",
        series={family: records for family, records in points.items() if records},
        joined=False,
    )
    return Results(
        summary="Table 1 of LHA, with strictly causal buckets and byte by byte: lower is better.",
        tables=[table, _baseline_table(records)],
        plots=[plot],
    )


def _line(scale: LmAblationScale, row: Ablation, records: JobResults) -> list[Value]:
    runs = [records[key(row.name, seed)] for seed in scale.seeds]
    size = scale.length if row.family in ("exact", "all keys") else scale.wide if row.wide else scale.size
    words = [run["test"]["word_perplexity"] for run in runs if "word_perplexity" in run["test"]]
    return [
        row.name,
        row.heads,
        row.layers,
        row.hash.partition(" (")[0],
        size,
        row.published or "not published",
        spread([run["validation"]["bits_per_byte"] for run in runs]),
        spread([run["test"]["bits_per_byte"] for run in runs]),
        spread(words, 0) if words else None,
        f"{1000 * statistics.fmean(run['training_seconds'] / run['steps'] for run in runs):.0f}",
    ]


def _mean(scale: LmAblationScale, row: Ablation, records: JobResults) -> float:
    return statistics.fmean(records[key(row.name, seed)]["test"]["bits_per_byte"] for seed in scale.seeds)


def _noise(scale: LmAblationScale, rows: list[Ablation], records: JobResults) -> str:
    """A comparison of the differences between rows with those between seeds, in words."""
    means = [_mean(scale, row, records) for row in rows]
    if len(scale.seeds) < 2:
        return f"One seed; the rows are within {max(means) - min(means):.3f} bits of one another."
    if len(rows) < 2:
        return "With one row there are no differences to compare with those between its seeds."
    each = [[records[key(row.name, seed)]["test"]["bits_per_byte"] for seed in scale.seeds] for row in rows]
    seeds = statistics.fmean(statistics.stdev(values) for values in each)
    return (
        f"The rows' means lie within {max(means) - min(means):.3f} bits of one another, with a standard deviation of "
        f"{statistics.stdev(means):.3f}; that between the seeds of a row is {seeds:.3f} on average."
    )


def _agreement(scale: LmAblationScale, rows: list[Ablation], records: JobResults) -> str:
    """The rank correlation of the published rows with ours, in words; empty if fewer than two were trained."""
    pairs = [(row.published, _mean(scale, row, records)) for row in rows if row.published]
    if len(pairs) < 2:
        return ""
    agreement = _rank_correlation([theirs for theirs, _ in pairs], [ours for _, ours in pairs])
    statement = "The order of the published rows and of ours (test bits) agree to a rank correlation of"
    return f"{statement} {agreement:.2f}; 0 is none. "


def _rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's, of values without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (first, second)]
    return statistics.correlation(*ranks)


def _baseline_table(records: JobResults) -> Table:
    lines = [
        [name, f"{metrics['bits_per_byte']:.3f}", metrics.get("word_perplexity")]
        for name, metrics in records["baselines"].items()
    ]
    return Table(
        title="Without attention, on the same test text",
        columns=["", "bits per byte", "PPL per word"],
        rows=lines,
        note="n-grams are interpolated (Witten and Bell), from the same training text. lzma: how much longer the "
        "compressed training text becomes when the test text is appended.",
    )


EXPERIMENT = Experiment(
    name="lm-ablation",
    title="Language modelling with local, LSH and LHA heads",
    source="Sun, Yang, Yoo 2022, table 1, section 5.1, appendix A.3",
    deviations=(
        "Strictly causal: each token is in the one bucket that it scores highest, of any size, N/B tokens on "
        "average. The paper ranks the whole sequence to fill buckets of one size, so that later tokens decide which "
        "earlier ones a token sees: a model that is trained so reads the future, and cannot generate what it was "
        "trained on.",
        "Bytes in place of words, without a vocabulary of 268k: a window has a fifth as much text. Perplexity per "
        "word is 2^(bits of all bytes / words), <unk> spelt as five bytes; it is comparable in kind only.",
        "WikiText-103 is not at hand: at `small` nine tenths of wikitext-2's valid.txt (1.0 MB) are learned from, "
        "the rest is the validation text, test.txt the test text, of both the first 50,000 bytes. They hold the "
        "articles of WikiText-103's own files, with more <unk>. `paper` reads train.txt, valid.txt and test.txt in "
        "the folder wikitext-103 of the data.",
        "Rows for exact attention, which the paper lacks: with the per-layer sinusoids of the heads that hash, and "
        "with the relative positions of the local ones, so that positions can be told from what is seen.",
        "Rows of systems that the paper discusses without a figure for this table: patterns (strided, fixed, BigBird, "
        "Longformer, LogSparse) of about the same number of keys as the windows, and attention to all keys "
        "(Synthesizer, linear, Performer), in all heads and layers, with the per-layer sinusoids. Sinkhorn attention "
        "has no row: it is not causal here.",
        "ψ of the loss from balanced membership, since argmax collapses (see the experiment training-dynamics).",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
    needs=lambda scale: [scale.corpus] if scale.corpus else [],
)
