"""Figure 2 of LHA: how much of exact attention falls on the keys that hash functions choose."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from subquad import hf
from subquad.core import checksums as seals
from subquad.methods import BoundMethod, Method, Routing, parse_method
from subquad.research.papers.at_hand import AtHand, at_hand, calibrate, calibrated_row, folders
from subquad.research.papers.base import AGAIN, Cell, Context, Experiment, JobResults, spread
from subquad.research.papers.results import HeatMap, Lines, Results, Table
from subquad.tools.data.texts import read_documents
from subquad.tools.inspect.run import utility_metrics
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained

BOUND = "upper bound"
CENTROIDS = "centroids.pt"


@dataclass(frozen=True, kw_only=True)
class AttentionUtilityScale:
    """The model, its texts, and what is fitted.

    Attributes:
        model: hub id or folder of an embedding model; "": the encoder of the extra `demo`.
        read: the text that utilities are taken on, under the data folder.
        fit: the text that hash functions and centroids are fitted to; another one.
        length: N, tokens of a sequence.
        buckets: B.
        sequences: number of sequences, spread evenly over the text; the first one is its beginning.
        steps: steps of LHA's calibration; 0: the method's own recipe.
        moves: updates of routing's centroids, each by one passage.
        seeds: seeds of random draws.
        fit_seeds: seeds of the calibrations.
    """

    model: str = ""
    read: str = "wikitext-2/valid.txt"
    fit: str = "wikitext-2/test.txt"
    length: int = 512
    buckets: int = 4
    sequences: int = 4
    steps: int = 0
    moves: int = 2000
    seeds: tuple[int, ...] = (0, 1, 2)
    fit_seeds: tuple[int, ...] = (0,)


SCALES = {
    "smoke": AttentionUtilityScale(
        model="random", read="read.txt", fit="fit.txt", length=48, sequences=1, steps=2, moves=3, seeds=(0,)
    ),
    "small": AttentionUtilityScale(sequences=2, steps=200, moves=1000),
    "paper": AttentionUtilityScale(sequences=1, fit_seeds=(0, 1, 2)),
}


def fit_key(seed: int) -> str:
    """A cell's name."""
    return f"fit lha seed={seed}"


def cells(scale: AttentionUtilityScale) -> list[Cell]:
    """The cells of what is learned, then one cell for each sequence, with all methods."""
    fits = [Cell(fit_key(seed), partial(_fit, scale, seed)) for seed in scale.fit_seeds]
    routing = [Cell("routing", partial(_follow, scale))]
    before = tuple(cell.key for cell in (*fits, *routing))
    return fits + routing + [Cell(f"sequence {i}", partial(_measure, scale, i), before) for i in range(scale.sequences)]


# ---------------------------------------------------------------------- one cell


def _fit(scale: AttentionUtilityScale, seed: int, context: Context) -> dict[str, Any]:
    at, method = at_hand(scale.model, context), f"lha:buckets={scale.buckets},seed={seed}"
    return calibrate(at, method, [scale.fit], context, steps=scale.steps, length=scale.length, seed=seed)


def _follow(scale: AttentionUtilityScale, context: Context) -> dict[str, Any]:
    """Routing's centroids follow the queries of the other text, as they do in training: spherical k-means."""
    at = at_hand(scale.model, context)
    pretrained = at.load(context.device)
    passages = sequences(pretrained, at, scale.fit, scale.length, min(16, scale.moves))
    queries: dict[int, list[torch.Tensor]] = {}
    for passage in passages:
        for call in inputs_of(pretrained, passage):
            queries.setdefault(call.number, []).append(call.query)
    centroids = {}
    for number, bound in _routing(scale, pretrained).items():
        assert bound.learned is not None
        for move in range(scale.moves):
            bound.learned.follow(queries[number][move % len(passages)], None)  # type: ignore[operator]
        centroids[number] = bound.learned.state_dict()
    seals.save(context.folder / CENTROIDS, centroids)
    return {"moves": scale.moves, "passages": len(passages)}


def _routing(scale: AttentionUtilityScale, pretrained: Pretrained) -> dict[int, BoundMethod]:
    layers = hf.find_layers(pretrained.model)
    return {layer.number: hf.bind(layer, Routing(clusters=scale.buckets)).to(pretrained.device) for layer in layers}


def _measure(scale: AttentionUtilityScale, i: int, context: Context) -> dict[str, Any]:
    """{method: {layer: utilities of the heads}}, with N/B keys, and the bound."""
    at = at_hand(scale.model, context)
    pretrained = at.load(context.device)
    passage = sequences(pretrained, at, scale.read, scale.length, scale.sequences)[i]
    members = _members(scale, pretrained, context)
    measured: dict[str, Any] = {BOUND: {}} | {label: {} for label in members}
    measured["own settings"] = {label: {} for label in members}
    for call in inputs_of(pretrained, passage):
        context.progress("layer", call.number, len(hf.find_layers(pretrained.model)))
        methods = {label: by_layer[call.number] for label, by_layer in members.items()}
        bound, utility = utility_metrics(call, methods, scale.length // scale.buckets)
        measured[BOUND][str(call.number)] = bound
        for label, utility_of in utility.items():
            measured[label][str(call.number)] = utility_of["n_b"].utility
            measured["own settings"][label][str(call.number)] = asdict(utility_of["given"])
    return measured


def _members(
    scale: AttentionUtilityScale, pretrained: Pretrained, context: Context
) -> dict[str, Mapping[int, Method | BoundMethod]]:
    """{label: {layer: what runs there}}; labels of the same method differ in the text after its seed."""
    layers = hf.find_layers(pretrained.model)
    members: dict[str, Mapping[int, Method | BoundMethod]] = {}
    for seed in scale.seeds:
        for label, method in random_methods(scale).items():
            one = parse_method(f"{method},seed={seed}")
            members[f"{label} seed={seed}"] = {layer.number: one for layer in layers}
    followed = _routing(scale, pretrained)
    members["routing (as it starts) seed=0"] = _routing(scale, pretrained)
    state = seals.load(context.beside("routing") / CENTROIDS, AGAIN)
    for number, bound in followed.items():
        assert bound.learned is not None
        bound.learned.load_state_dict(state[number])
    members["routing (fitted) seed=0"] = followed
    start = parse_method(f"lha:buckets={scale.buckets}")
    members["LHA (as it starts) seed=0"] = {layer.number: hf.bind(layer, start) for layer in layers}
    for seed in scale.fit_seeds:
        members[f"LHA (calibrated) seed={seed}"] = calibrated_row(pretrained, fit_key(seed), context).bounds
    return members


def random_methods(scale: AttentionUtilityScale) -> dict[str, str]:
    """The methods that are drawn rather than learned: {label: method}."""
    return {
        "random buckets": f"lsh:buckets={scale.buckets},hash=random",
        "LSH": f"lsh:buckets={scale.buckets}",
        "SMYRF": f"smyrf:clusters={scale.buckets}",
    }


def inputs_of(pretrained: Pretrained, passage: Sequence[int]) -> list[LayerInputs]:
    """The inputs of the layers when the model reads a passage with exact attention."""
    with recorded(pretrained.model) as calls:
        pretrained.forward([passage])
    return list(calls)


def sequences(pretrained: Pretrained, at: AtHand, file: str, length: int, count: int) -> list[list[int]]:
    """`count` sequences of `length` tokens, evenly spread over a text; the first one is its beginning."""
    reading = read(pretrained, read_documents(at.texts([file])), length, 1, seed=0)
    return reading.sequences(pretrained, length, count)


# ---------------------------------------------------------------------- what comes out


def families(labels: Iterable[str]) -> dict[str, list[str]]:
    """Labels of the same method with different seeds, together."""
    members_of: dict[str, list[str]] = {}
    for label in labels:
        members_of.setdefault(label.partition(" seed=")[0], []).append(label)
    return members_of


def by_head(runs: Sequence[Mapping[str, Sequence[float]]]) -> list[list[float]]:
    """Layers × heads: means over runs of {layer: values of the heads}."""
    layers = sorted(runs[0], key=int)
    return [
        [statistics.fmean(values) for values in zip(*(run[layer] for run in runs), strict=True)] for layer in layers
    ]


def results(scale: AttentionUtilityScale, records: JobResults) -> Results:
    """Means and layers of every method, next to the bound."""
    read_ = [records[f"sequence {i}"] for i in range(scale.sequences)]
    groups = families(label for label in read_[0] if label != "own settings")
    heads = {name: by_head([one[label] for one in read_ for label in labels]) for name, labels in groups.items()}
    top = statistics.fmean(value for layer in heads[BOUND] for value in layer)
    rows = []
    for name, labels in groups.items():
        means = [
            statistics.fmean(v for one in read_ for layer in one[label].values() for v in layer) for label in labels
        ]
        values = [value for layer in heads[name] for value in layer]
        share = f"{100 * statistics.fmean(means) / top:.0f}"
        rows.append(
            [name, spread(means), f"{min(values):.3f}", f"{max(values):.3f}", share, *_recorded_settings(read_, labels)]
        )
    columns = ["buckets", "utility", "least head", "best head", "% of the bound", "own settings: utility", "keys"]
    keys = scale.length // scale.buckets
    table = Table(
        title=f"Attention utility with {scale.buckets} buckets of {keys} queries and keys",
        columns=columns,
        rows=rows,
        note=f"Means over layers, heads and {scale.sequences} sequences, ± over seeds where there are several. Upper "
        f"bound: each query's {keys} best keys; random buckets have 1/B = {1 / scale.buckets:g}. Own settings: buckets "
        "√2 times as large for LSH and LHA, two rounds for SMYRF. The paper's figure 2 is a box plot without numbers: "
        "LSH and SMYRF stay far below the bound and below LHA.",
    )
    first = records[fit_key(scale.fit_seeds[0])]
    summary = (
        "The share of exact attention that falls on the keys of a query's bucket. LHA was fitted for "
        f"{first['steps']} steps ({first['seconds']:.0f} s): its utility on held-out passages was "
        f"{first['start']:.3f} before and {first['kept']:.3f} after."
    )
    return Results(summary=summary, tables=[table], plots=_plots(scale, heads))


def _recorded_settings(read_: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> list[str | None]:
    """Utility and keys with the method's own settings."""
    texts = [one["own settings"][label] for one in read_ for label in labels if label in one["own settings"]]
    if not texts:
        return [None, None]
    means = [
        statistics.fmean(v for one in texts for layer in one.values() for v in layer[name])
        for name in ("utility", "keys")
    ]
    return [f"{means[0]:.3f}", f"{means[1]:.0f}"]


def _plots(scale: AttentionUtilityScale, heads: Mapping[str, Sequence[Sequence[float]]]) -> list[Lines | HeatMap]:
    layers = [str(layer) for layer in range(len(heads[BOUND]))]
    columns = [str(head) for head in range(len(heads[BOUND][0]))]
    means = {name: [statistics.fmean(layer) for layer in values] for name, values in heads.items()}
    lines = Lines(
        file="utility-by-layer",
        title="mean over the heads of each layer",
        x="layer",
        y="attention utility",
        series={name: [(float(i), mean) for i, mean in enumerate(values)] for name, values in means.items()},
        levels={"1/B": 1 / scale.buckets},
    )
    shown = {"upper-bound": BOUND, "lha": "LHA (calibrated)", "lsh": "LSH", "smyrf": "SMYRF"}
    maps = [
        HeatMap(
            file=f"utility-{file}",
            title=f"{name}, by layer and head",
            x="head",
            y="layer",
            columns=columns,
            rows=layers,
            values=heads[name],
        )
        for file, name in shown.items()
    ]
    return [lines, *maps]


EXPERIMENT = Experiment(
    name="attention-utility",
    title="Attention utility of hash functions, learned and random",
    source="Sun, Yang, Yoo 2022, figure 2, appendix A.1",
    deviations=(
        "The encoder at hand in place of a 16-layer language model that the authors trained on WikiText-103; so there "
        "is no causal mask to leave out.",
        "N = 512, the reach of the encoder's positions, in place of 1,024, and WikiText-2, whose validation text is "
        "that of WikiText-103; at `small` several sequences of it, the first of them its beginning.",
        "Hash functions are fitted to the frozen model on WikiText-2's test text, with membership balanced in the "
        "loss: with the paper's argmax membership they collapse (see bucket-imbalance).",
        "A query that no bucket took attends in the bucket that it scores highest, here as in the methods themselves; "
        "in the paper's definition every query is in one bucket.",
        "Routing is here too, with centroids that follow the queries of the same other text: its clusters are of "
        "queries alone, whatever the keys are.",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
    needs=lambda scale: folders(scale.model, (), [scale.read, scale.fit]),
)
