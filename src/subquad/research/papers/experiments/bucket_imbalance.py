"""Figures 1 and 6 of LHA: how evenly hash functions fill their buckets when nothing balances them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from subquad import hf
from subquad.methods import BoundMethod, Method, parse_method
from subquad.research.papers.at_hand import at_hand, calibrate, calibrated_row, folders
from subquad.research.papers.base import Cell, Context, Experiment, JobResults, spread
from subquad.research.papers.experiments.attention_utility import inputs_of, sequences
from subquad.research.papers.results import Bars, Lines, Results, Table, Value
from subquad.tools.inspect.run import size_metrics
from subquad.tools.measure.balance import BucketSizes
from subquad.tools.models.pretrained import Pretrained

PUBLISHED = {"LSH": {"size": 0.359, "ratio": 0.613}}  # section 3.2; of 640 buckets
BINS = 16  # of sizes, up to all tokens
WIDEST = 4  # powers of 2 of a ratio that are told apart


@dataclass(frozen=True, kw_only=True)
class BucketImbalanceScale:
    """The model, its texts, and what is fitted; as in `attention_utility`.

    Attributes:
        layer: the layer whose buckets are drawn one by one; the paper's third one is number 2.
        heads: number of its heads that are drawn.
    """

    model: str = ""
    read: str = "wikitext-2/valid.txt"
    fit: str = "wikitext-2/test.txt"
    length: int = 512
    buckets: int = 4
    sequences: int = 4
    layer: int = 2
    heads: int = 10
    steps: int = 0
    seeds: tuple[int, ...] = (0, 1, 2)
    fit_seeds: tuple[int, ...] = (0,)


SCALES = {
    "smoke": BucketImbalanceScale(
        model="random", read="read.txt", fit="fit.txt", length=48, sequences=1, layer=1, steps=2, seeds=(0,)
    ),
    "small": BucketImbalanceScale(sequences=2, steps=75),
    "paper": BucketImbalanceScale(sequences=1, fit_seeds=(0, 1, 2)),
}
LEARNED = {"LHA": "balanced", "LHA, argmax loss": "argmax"}  # membership in the loss


def fit_key(label: str, seed: int) -> str:
    """A cell's name."""
    return f"fit {label} seed={seed}"


def cells(scale: BucketImbalanceScale) -> list[Cell]:
    """The cells of what is learned, then one cell for each sequence, with all methods."""
    fits = [
        Cell(fit_key(label, seed), partial(_fit, scale, label, seed)) for label in LEARNED for seed in scale.fit_seeds
    ]
    before = tuple(cell.key for cell in fits)
    return fits + [Cell(f"sequence {i}", partial(_measure, scale, i), before) for i in range(scale.sequences)]


def _fit(scale: BucketImbalanceScale, label: str, seed: int, context: Context) -> dict[str, Any]:
    method = f"lha:buckets={scale.buckets},membership={LEARNED[label]},seed={seed}"
    at = at_hand(scale.model, context)
    return calibrate(at, method, [scale.fit], context, steps=scale.steps, length=scale.length, seed=seed)


def _measure(scale: BucketImbalanceScale, i: int, context: Context) -> dict[str, Any]:
    """{method: {seed: {layer: {"queries", "keys": heads × buckets}}}}."""
    at = at_hand(scale.model, context)
    pretrained = at.load(context.device)
    passage = sequences(pretrained, at, scale.read, scale.length, scale.sequences)[i]
    members = _members(scale, pretrained, context)
    measured: dict[str, dict[str, Any]] = {}
    for call in inputs_of(pretrained, passage):
        for (label, seed), by_layer in members.items():
            sizes = size_metrics(call, {label: by_layer[call.number]})[label]
            measured.setdefault(label, {}).setdefault(str(seed), {})[str(call.number)] = sizes
    return measured


def _members(
    scale: BucketImbalanceScale, pretrained: Pretrained, context: Context
) -> dict[tuple[str, int], Mapping[int, Method | BoundMethod]]:
    """{(label, seed): {layer: what hashes there}}."""
    layers = hf.find_layers(pretrained.model)
    members: dict[tuple[str, int], Mapping[int, Method | BoundMethod]] = {}
    drawn = {
        "LSH": f"lsh:buckets={scale.buckets}",
        "LSH after SMYRF's transformation": f"smyrf:clusters={scale.buckets}",
    }
    for label, method in drawn.items():
        for seed in scale.seeds:
            one = parse_method(f"{method},seed={seed}")
            members[label, seed] = {layer.number: one for layer in layers}
    for label in LEARNED:
        for seed in scale.fit_seeds:
            members[label, seed] = calibrated_row(pretrained, fit_key(label, seed), context).bounds
    return members


# ---------------------------------------------------------------------- what comes out


def together(sizes: Sequence[Mapping[str, Mapping[str, Any]]]) -> BucketSizes:
    """Buckets of all layers and heads of some runs, each {layer: {"queries", "keys": heads × buckets}}."""
    queries, keys = (
        torch.tensor([head for run in sizes for layer in run.values() for head in layer[side]])[None]
        for side in ("queries", "keys")
    )
    return BucketSizes(queries, keys, torch.ones_like(queries, dtype=torch.bool))


def size_histogram(sizes: BucketSizes, largest: int) -> list[tuple[float, float]]:
    """(middle of the bin, share of the buckets), from no token to all of them."""
    width = largest / BINS
    counts = Counter(min(int(total / width), BINS - 1) for total in sizes.total.flatten().tolist())
    return [((i + 0.5) * width, counts[i] / sizes.total.numel()) for i in range(BINS)]


def ratio_histogram(sizes: BucketSizes) -> list[tuple[float, float]]:
    """(log2 of queries/keys to the nearest half, share of the buckets that have both); the ends hold what is beyond."""
    both = (sizes.queries > 0) & (sizes.keys > 0)
    powers = [max(-WIDEST, min(WIDEST, round(2 * math.log2(ratio)) / 2)) for ratio in sizes.ratios[both].tolist()]
    counts = Counter(powers)
    steps = [half / 2 for half in range(-2 * WIDEST, 2 * WIDEST + 1)]
    return [(step, counts[step] / max(1, len(powers))) for step in steps]


def results(scale: BucketImbalanceScale, records: JobResults) -> Results:
    """Shares of unbalanced buckets next to the published ones, histograms, buckets of one layer."""
    read_ = [records[f"sequence {i}"] for i in range(scale.sequences)]
    rows = [
        _row(label, [together([one[label][seed] for one in read_]) for seed in seeds])
        for label, seeds in read_[0].items()
    ]
    columns = ["hash", "size, %", "of filled, %", "published", "ratio, %", "of both, %", "published", "empty, %"]
    table = Table(
        title=f"Unbalanced buckets, B = {scale.buckets}",
        columns=columns,
        rows=rows,
        note="Each token is in the bucket that it scores highest. Size: more than twice or less than half of the "
        f"expected {2 * scale.length // scale.buckets} queries and keys, of all buckets, and of those that are not "
        "empty. Ratio: more than 2 queries per key or keys per query, of all buckets (an empty one is not unbalanced), "
        "and of those with both. The paper does not state which buckets its shares are of. ± over seeds.",
    )
    everything = {label: together([one[label][seed] for one in read_ for seed in one[label]]) for label in read_[0]}
    gains = [records[fit_key(label, scale.fit_seeds[0])] for label in LEARNED]
    statement = ", ".join(
        f"{label}: {gain['kept']:.3f} (started at {gain['start']:.3f}) after {gain['steps']} steps"
        for label, gain in zip(LEARNED, gains, strict=True)
    )
    return Results(
        summary="Queries and keys in the buckets of hash functions when nothing balances them. Attention utility of "
        f"the fitted ones with balanced buckets, on held-out passages: {statement}.",
        tables=[table],
        plots=[*_histograms(scale, everything), *_bars(scale, read_[0])],
    )


def _row(label: str, runs: Sequence[BucketSizes]) -> list[Value]:
    shares = [run.imbalance() for run in runs]

    def percent(name: str) -> str:
        return spread([getattr(share, name) for share in shares], 1, percent=True)

    published = {name: f"{100 * share:.1f}" for name, share in PUBLISHED.get(label, {}).items()}
    empty = spread([float((run.total == 0).double().mean()) for run in runs], 1, percent=True)
    size = [percent("size"), percent("size_of_filled"), published.get("size")]
    return [label, *size, percent("ratio"), percent("ratio_of_both"), published.get("ratio"), empty]


def _histograms(scale: BucketImbalanceScale, buckets: Mapping[str, BucketSizes]) -> list[Lines]:
    return [
        Lines(
            file="bucket-sizes",
            title="sizes of the buckets of all heads in all layers",
            x=f"queries and keys in a bucket (balanced: {2 * scale.length // scale.buckets})",
            y="share of the buckets",
            series={label: size_histogram(sizes, 2 * scale.length) for label, sizes in buckets.items()},
        ),
        Lines(
            file="bucket-ratios",
            title="queries to keys in the buckets of all heads in all layers",
            x="log2 of queries/keys, of buckets that have both (balanced: 0; ends hold what is beyond)",
            y="share of the buckets",
            series={label: ratio_histogram(sizes) for label, sizes in buckets.items()},
        ),
    ]


def _bars(scale: BucketImbalanceScale, first: Mapping[str, Any]) -> list[Bars]:
    """Queries and keys of each bucket of some heads of one layer in the first sequence, largest buckets first."""
    return [_bars_of(scale, number, label, first[label]) for number, label in enumerate(first)]


def _bars_of(scale: BucketImbalanceScale, number: int, label: str, by_seed: Mapping[str, Any]) -> Bars:
    layer = next(iter(by_seed.values()))[str(scale.layer)]
    heads = [
        sorted(zip(queries, keys, strict=True), key=sum, reverse=True)
        for queries, keys in list(zip(layer["queries"], layer["keys"], strict=True))[: scale.heads]
    ]
    sides = ("queries", "keys")
    return Bars(
        file=f"bucket-heads-{number + 1}",
        title=f"{label}: buckets of {len(heads)} heads of layer {scale.layer}, from the largest to the smallest",
        y="tokens",
        groups=[
            f"head {head}" if bar == 0 else "" for head, buckets in enumerate(heads) for bar in range(len(buckets))
        ],
        series={name: [float(b[side]) for head in heads for b in head] for side, name in enumerate(sides)},
        levels={"balanced": float(scale.length // scale.buckets)},
    )


EXPERIMENT = Experiment(
    name="bucket-imbalance",
    title="How unevenly hash functions fill their buckets",
    source="Sun, Yang, Yoo 2022, figures 1 and 6, section 3.2, appendix H",
    deviations=(
        "The encoder at hand in place of a 16-layer language model that the authors trained on WikiText-103.",
        "N = 512, the reach of the encoder's positions, in place of 1,024, and WikiText-2, whose validation text is "
        "that of WikiText-103; at `small` several sequences of it, the first of them its beginning.",
        "LHA twice: with membership balanced in its loss, the default here, and by argmax, as the paper writes it.",
        "Hash functions are fitted to the frozen model on WikiText-2's test text.",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
    needs=lambda scale: folders(scale.model, (), [scale.read, scale.fit]),
)
