"""The error of random features against softmax attention: the kernel, the attention matrix, a pretrained encoder."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.tokens.heads import repeat_heads
from subquad.methods import Full, Performer
from subquad.research.papers.at_hand import RANDOM, at_hand, folders
from subquad.research.papers.base import Cell, Context, Experiment, JobResults
from subquad.research.papers.experiments.spectrum import layer_inputs, token_windows
from subquad.research.papers.kernel_error import KINDS, expected, measured, pairs, per_row
from subquad.research.papers.results import Lines, Results, Table
from subquad.tools.measure.capture import LayerInputs
from subquad.tools.measure.fidelity import attention_weights
from subquad.tools.measure.timing import Spread, spread
from subquad.tools.models.pretrained import load

ROWS = ("iid", "orthogonal")
MEAN_POOL = "mean-pool"  # every key has the same weight
Errors = dict[str, dict[int, Spread]]  # by name and number of features


@dataclass(frozen=True, kw_only=True)
class PerformerApproximationScale:
    """The settings of Performer's approximation: what is estimated, and with how many features."""

    # the kernel e^{x·y}, x and y of one norm
    width: int = 64
    norm: float = 1.0  # the norm at which the number of features varies
    kernel_features: tuple[int, ...] = (16, 64, 256, 1024)
    norms: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # with the second number of features
    draws: int = 300
    # attention of normal queries and keys
    length: int
    head_dim: int = 16
    deviations: tuple[float, ...] = (0.5, 1.0)  # standard deviations of the entries of queries and keys
    features: tuple[int, ...] = (16, 32, 64, 128, 256)
    samples: int = 15
    # attention of a pretrained encoder
    model: str = ""  # hub id or folder; "": the encoder of the extra `demo`
    text: str = "wikitext-2/test.txt"
    tokens: int = 512
    sequences: int = 2
    model_features: tuple[int, ...] = (64, 256, 1024, 4096)


SCALES = {
    "smoke": PerformerApproximationScale(
        kernel_features=(4, 8),
        norms=(0.5, 1.0),
        draws=3,
        length=16,
        deviations=(0.5,),
        features=(4, 8),
        samples=1,
        model=RANDOM,
        text="read.txt",
        tokens=32,
        sequences=1,
        model_features=(8, 16),
    ),
    "small": PerformerApproximationScale(length=1024),
    "paper": PerformerApproximationScale(length=4096, model="FacebookAI/roberta-base", sequences=8),
}


def cells(scale: PerformerApproximationScale) -> list[Cell]:
    """The kernel, attention of drawn inputs sample by sample, attention of the encoder sequence by sequence."""
    return [
        *(Cell(f"kernel {rows}", partial(_kernel, scale, rows)) for rows in ROWS),
        *(
            Cell(attention_key(deviation, sample), partial(_attention, scale, deviation, sample))
            for deviation in scale.deviations
            for sample in range(scale.samples)
        ),
        *(Cell(model_key(i), partial(_model, scale, i)) for i in range(scale.sequences)),
    ]


def attention_key(deviation: float, sample: int) -> str:
    """A cell's name."""
    return f"attention deviation={deviation:g} sample={sample}"


def model_key(sequence: int) -> str:
    """A cell's name."""
    return f"model sequence={sequence}"


# ---------------------------------------------------------------------- the kernel


def kernel_points(scale: PerformerApproximationScale) -> list[tuple[float, int]]:
    """The pairs (norm, features) that are measured: one of them fixed, then the other."""
    fixed = scale.kernel_features[min(1, len(scale.kernel_features) - 1)]
    of_features = [(scale.norm, number) for number in scale.kernel_features]
    return list(dict.fromkeys([*of_features, *((norm, fixed) for norm in scale.norms)]))


def _kernel(scale: PerformerApproximationScale, rows: str, context: Context) -> dict[str, Any]:
    """The relative error of each kind at each place; with independent rows the exact one too."""
    measured_errors: dict[str, Any] = {}
    for kind in KINDS:
        context.progress(kind, KINDS.index(kind), len(KINDS))
        measured_errors[kind] = [
            [norm, number, measured(kind, *xy, number, scale.draws, rows == "iid"), expected(kind, *xy, number)]
            for norm, number in kernel_points(scale)
            for xy in [pairs(norm, scale.width, 64)]
        ]
    return measured_errors


# ---------------------------------------------------------------------- attention


def performer(kind: str, rows: str, features: int, norm: float, seed: int = 0) -> Performer:
    """A Performer with `features` features, whatever number a row of its matrix makes."""
    return Performer(features=features // per_row(kind), kind=kind, rows=rows, norm=norm, seed=seed)


def squared_norm(query: Tensor, key: Tensor, scale: float) -> float:
    """E‖z‖² of z = q + k, both times √scale, over all queries and keys of all heads."""
    key = repeat_heads(key, query.shape[1])
    squares = query.square().sum(-1).mean(-1) + key.square().sum(-1).mean(-1)
    return float(scale * (squares + 2 * (query.mean(2) * key.mean(2)).sum(-1)).mean())


def _attention(scale: PerformerApproximationScale, deviation: float, sample: int, context: Context) -> dict[str, Any]:
    """Mean square errors of the attention matrix and of the output, by kind, rows and number of features."""
    generator = torch.Generator().manual_seed(sample)
    drawn = torch.randn(3, 1, 1, scale.length, scale.head_dim, generator=generator, dtype=torch.float64)
    query, key, value = deviation * drawn[0], deviation * drawn[1], drawn[2]
    exact = attention_weights(Full(), query, key, key)
    norm = squared_norm(query, key, scale.head_dim**-0.5)

    def errors(weights: Tensor) -> dict[str, float]:
        apart = weights - exact
        return {"matrix": float(apart.square().mean()), "output": float((apart @ value).square().mean())}

    measured: dict[str, Any] = {MEAN_POOL: errors(torch.full_like(exact, 1 / scale.length))}
    for kind in KINDS:
        context.progress(kind, KINDS.index(kind), len(KINDS))
        for rows in ROWS:
            methods = {number: performer(kind, rows, number, norm, sample) for number in scale.features}
            measured[f"{kind} {rows}"] = {
                str(number): errors(attention_weights(method, query, key, key)) for number, method in methods.items()
            }
    return measured


def _model(scale: PerformerApproximationScale, sequence: int, context: Context) -> dict[str, Any]:
    """For each layer, the size of its logits and the relative error of each head's output."""
    at = at_hand(scale.model, context)
    pretrained = load(at.model, context.device)
    item = token_windows(at, pretrained, scale.text, scale.tokens, scale.sequences)[sequence]
    layers = []
    for inputs in layer_inputs(pretrained, item):
        context.progress(f"layer {inputs.number}", inputs.number, 0)
        layers.append(_layer(scale, inputs))
    return {"layers": layers}


@torch.no_grad()
def _layer(scale: PerformerApproximationScale, inputs: LayerInputs) -> dict[str, Any]:
    query, key, value = inputs.query, inputs.key, inputs.value
    factor = inputs.options["scale"] or query.shape[3] ** -0.5
    exact, norm = inputs.run(Full()), squared_norm(query, key, factor)
    pooled = repeat_heads(value, query.shape[1]).mean(2, keepdim=True).expand_as(exact)
    kinds = {f"{kind} orthogonal": kind for kind in KINDS}
    return {
        "logits": float((query @ repeat_heads(key, query.shape[1]).mT * factor).std()),
        "norm": norm,
        MEAN_POOL: head_errors(pooled, exact),
        **{
            name: {
                str(number): head_errors(inputs.run(performer(kind, "orthogonal", number, norm)), exact)
                for number in scale.model_features
            }
            for name, kind in kinds.items()
        },
    }


def head_errors(out: Tensor, exact: Tensor) -> list[float]:
    """‖out − exact‖ / ‖exact‖ of each head of one item."""
    apart, size = ((x.double()).norm(dim=(2, 3))[0] for x in (out - exact, exact))
    return [float(error) for error in apart / size]


# ---------------------------------------------------------------------- what comes out


def results(scale: PerformerApproximationScale, records: JobResults) -> Results:
    """Tables and plots of the three."""
    tables, plots = _kernel_results(scale, records)
    for deviation in scale.deviations:
        table, drawn = _attention_results(scale, deviation, records)
        tables.append(table)
        plots += drawn
    by_features, by_layer, plot = _model_results(scale, records)
    return Results(
        summary="Random features estimate e^{x·y} without bias; what matters is how far off they are. Hyperbolic and "
        "trigonometric features are two a row and are counted as two. `favor++` has its A for the mean of ‖q + k‖².",
        tables=[*tables, by_features, by_layer],
        plots=[*plots, plot],
    )


def _kernel_results(scale: PerformerApproximationScale, records: JobResults) -> tuple[list[Table], list[Lines]]:
    errors = {
        (rows, kind): {(n, r): (e, x) for n, r, e, x in records[f"kernel {rows}"][kind]}
        for rows in ROWS
        for kind in KINDS
    }
    fixed = kernel_points(scale)[min(1, len(scale.kernel_features) - 1)][1]
    tables, plots = [], []
    for what, at in (
        ("features", [(scale.norm, number) for number in scale.kernel_features]),
        ("norm", [(norm, fixed) for norm in scale.norms]),
    ):
        here = f"norm {scale.norm:g}" if what == "features" else f"{fixed} features"
        xs = [float(number if what == "features" else norm) for norm, number in at]
        head = [f"{kind}, {drawn}" for kind in KINDS for drawn in ("iid", "exact", "orthogonal")]
        body = [
            [
                f"{x:g}",
                *(f"{e:.3g}" for kind in KINDS for e in (*errors["iid", kind][p], errors["orthogonal", kind][p][0])),
            ]
            for x, p in zip(xs, at, strict=True)
        ]
        tables.append(Table(title=f"Relative error of e^(x·y), {here}", columns=[what, *head], rows=body, note=KERNEL))
        series = {}
        for kind in KINDS:
            series[f"{kind} iid, formula"] = [(x, errors["iid", kind][p][1]) for x, p in zip(xs, at, strict=True)]
            for rows in ROWS:
                series[f"{kind} {rows}"] = [(x, errors[rows, kind][p][0]) for x, p in zip(xs, at, strict=True)]
        plots.append(
            Lines(
                file=f"kernel-by-{what}",
                title=f"relative error of the estimate of exp(x·y), {here}",
                x="features" if what == "features" else "norm of x and of y",
                y="relative error",
                series=series,
                log_x=True,
                log_y=True,
            )
        )
    return tables, plots


KERNEL = (
    "√(mean (estimate/e^(x·y) − 1)²) over pairs in random directions and draws; exact: of iid rows, from the variance. "
    "Large errors of positive estimates come from rare draws, so that above a norm of 1 the measured means lie below."
)


def _attention_results(
    scale: PerformerApproximationScale, deviation: float, records: JobResults
) -> tuple[Table, list[Lines]]:
    samples = [records[attention_key(deviation, sample)] for sample in range(scale.samples)]
    plots, rows = [], []
    for what in ("output", "matrix"):
        errors: Errors = {
            f"{kind} {r}": {n: spread([s[f"{kind} {r}"][str(n)][what] for s in samples]) for n in scale.features}
            for kind in KINDS
            for r in ROWS
        }
        pooled = statistics.median(sample[MEAN_POOL][what] for sample in samples)
        rows += [
            [f"{name}, {what}", *(f"{spreads[n].median:.2e}" for n in scale.features)]
            for name, spreads in errors.items()
        ]
        rows.append([f"{MEAN_POOL}, {what}", *[f"{pooled:.2e}"] * len(scale.features)])
        title = f"mean square error of the {what}, entries of q and k of deviation {deviation:g}"
        plots.append(_lines(f"attention-{what}-{deviation:g}", title, "mean square error", errors, {MEAN_POOL: pooled}))
    table = Table(
        title=f"Mean square error of attention, entries of q and k of deviation {deviation:g}",
        columns=["features", *map(str, scale.features)],
        rows=rows,
        note=f"{scale.length:,} tokens, D = {scale.head_dim}, medians of {scale.samples} samples. The paper's figure 4 "
        "gives curves, no numbers: orthogonal rows are better than iid ones, positive features far better than "
        "trigonometric ones. Mean pooling, which looks at no key, needs no features.",
    )
    return table, plots


def _model_results(scale: PerformerApproximationScale, records: JobResults) -> tuple[Table, Table, Lines]:
    layers = [layer for i in range(scale.sequences) for layer in records[model_key(i)]["layers"]]
    names = [f"{kind} orthogonal" for kind in KINDS]
    errors: Errors = {
        name: {n: spread([e for layer in layers for e in layer[name][str(n)]]) for n in scale.model_features}
        for name in names
    }
    pooled = spread([error for layer in layers for error in layer[MEAN_POOL]])
    rows = [[name, *(_quartiles(spreads[n]) for n in scale.model_features)] for name, spreads in errors.items()]
    rows.append([MEAN_POOL, *[_quartiles(pooled)] * len(scale.model_features)])
    by_features = Table(
        title="Relative error of the output in the pretrained encoder",
        columns=["features", *map(str, scale.model_features)],
        rows=rows,
        note=f"{scale.tokens} tokens; median (quartiles) over {scale.sequences} sequences, all layers and heads. Mean "
        "pooling looks at no key at all: a row above it approximates nothing.",
    )
    level = {f"{MEAN_POOL}, median": pooled.median}
    title = "relative error of a head's output in the pretrained encoder"
    plot = _lines("encoder-error", title, "relative error", errors, level)
    return by_features, _by_layer(scale, records), plot


def _by_layer(scale: PerformerApproximationScale, records: JobResults) -> Table:
    most = str(max(scale.model_features))
    rows = []
    for number, layer in enumerate(
        zip(*(records[model_key(i)]["layers"] for i in range(scale.sequences)), strict=True)
    ):
        norm = statistics.fmean(head["norm"] for head in layer)
        errors = [
            statistics.median(error for head in layer for error in each(head))
            for each in (lambda head: head["positive orthogonal"][most], lambda head: head[MEAN_POOL])
        ]
        logits = statistics.fmean(head["logits"] for head in layer)
        rows.append(
            [str(number), f"{logits:.2f}", f"{norm:.1f}", f"10^{norm / LN_10:.0f}", *(f"{e:.3f}" for e in errors)]
        )
    return Table(
        title="Why: the logits of each layer",
        columns=[
            "layer",
            "standard deviation of the logits",
            "mean ‖q + k‖², scaled",
            "positive features for a relative error of 1",
            f"error, positive, {most} features",
            f"error, {MEAN_POOL}",
        ],
        rows=rows,
        note="The variance of one positive feature's estimate of e^(q·k), relative, is e^(‖q + k‖²) − 1: as many iid "
        "features as that have a relative error of 1.",
    )


LN_10 = 2.302585


def _quartiles(values: Spread) -> str:
    return f"{values.median:.3g} ({values.low:.3g}–{values.high:.3g})"


def _lines(file: str, title: str, y: str, errors: Errors, levels: Mapping[str, float]) -> Lines:
    points: dict[str, Sequence[tuple[float, float]]] = {
        name: [(float(n), each.median) for n, each in by_features.items()] for name, by_features in errors.items()
    }
    bands = {name: [(each.low, each.high) for each in by_features.values()] for name, by_features in errors.items()}
    return Lines(
        file=file,
        title=title,
        x="features",
        y=y,
        series=points,
        bands=bands,
        levels=levels,
        log_x=True,
        log_y=True,
    )


EXPERIMENT = Experiment(
    name="performer-approximation",
    title="How close random features come to softmax attention",
    source="Choromanski et al. 2021, figure 4, lemma 2 and section 4.1; Likhosherstov et al. 2022 (favor++)",
    deviations=(
        "In small 1,024 tokens in place of 4,096 for drawn queries and keys.",
        'The paper says of its inputs "appropriately normalized": here their entries are normal with the deviations '
        "that are stated, and q·k is divided by √D.",
        "In addition to the paper's kinds: favor++, mean pooling, and a pretrained encoder's own queries and "
        "keys, all-MiniLM-L6-v2 in small, which the paper does not show.",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
    needs=lambda scale: folders(scale.model, (), [scale.text]),
)
