"""Figure 1 of Linformer: the spectrum of attention's weights in a pretrained encoder."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subquad.research.papers.at_hand import RANDOM, AtHand, at_hand, folders
from subquad.research.papers.base import Cell, Context, Experiment, JobResults, slug
from subquad.research.papers.results import HeatMap, Lines, Results, Table
from subquad.tools.data.reviews import read_reviews
from subquad.tools.data.texts import read_documents
from subquad.tools.inspect.run import curve_points, spectrum_metrics
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.measure.singular_values import heat_map_index
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, load

UNTRAINED = "untrained"
DOCUMENTS = 60  # of a text in many documents that are read, evenly spread: enough for all sequences


@dataclass(frozen=True, kw_only=True)
class SpectrumScale:
    """The settings of the spectrum experiment: what is read, and by which model."""

    model: str = ""  # hub id or folder; "": the encoder of the extra `demo`
    texts: tuple[str, ...] = ("wikitext-2/test.txt", "movie_reviews/movie_reviews.zip")
    length: int = 512
    sequences: int = 4  # number for each text


SCALES = {
    "smoke": SpectrumScale(model=RANDOM, texts=("read.txt",), length=32, sequences=1),
    "small": SpectrumScale(),
    "paper": SpectrumScale(model="FacebookAI/roberta-base", sequences=32),
}


def key(source: str) -> str:
    """A cell's name."""
    return f"spectrum {source}"


def sources(scale: SpectrumScale) -> list[str]:
    """The texts, and the model with random weights on the first of them."""
    return [*scale.texts, UNTRAINED]


def cells(scale: SpectrumScale) -> list[Cell]:
    """One text each; the last is the baseline, a model that has learned nothing."""
    return [Cell(key(source), partial(_spectra, scale, source)) for source in sources(scale)]


def _spectra(scale: SpectrumScale, source: str, context: Context) -> dict[str, Any]:
    """Means over the sequences, by layer and head: Y at each j of a curve, and how many values hold 90 %."""
    at = at_hand(scale.model, context)
    pretrained = load(at.model, context.device)
    if source == UNTRAINED:
        pretrained = untrained(pretrained)
    items = token_windows(
        at, pretrained, scale.texts[0] if source == UNTRAINED else source, scale.length, scale.sequences
    )
    points, spectra = curve_points(scale.length), []
    for done, item in enumerate(items):
        layers = layer_inputs(pretrained, item)
        for inputs in layers:
            context.progress(f"layer {inputs.number}", done, len(items))
            spectra.append(spectrum_metrics(inputs, points))
    by_layer = [spectra[layer :: len(layers)] for layer in range(len(layers))]
    return {
        "at": points,
        "curves": [_mean([sequence.curves for sequence in layer]) for layer in by_layer],
        "needed": [_mean([[sequence.needed] for sequence in layer])[0] for layer in by_layer],
    }


def _mean(tables: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Entry by entry, over tables of one shape."""
    return [[round(value, 6) for value in row] for row in torch.tensor(tables).double().mean(0).tolist()]


def untrained(pretrained: Pretrained) -> Pretrained:
    """A copy of the model with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = type(pretrained.model)(pretrained.model.config)
    return replace(pretrained, model=model.eval().to(pretrained.device))


def token_windows(at: AtHand, pretrained: Pretrained, text: str, length: int, count: int) -> list[list[int]]:
    """Items of this length, evenly spread over a text."""
    (path,) = at.texts([text])
    documents = [review.text for review in read_reviews(path)] if path.suffix == ".zip" else read_documents([path])
    documents = documents[:: -(-len(documents) // DOCUMENTS)]
    return read(pretrained, documents, length, 1, 0).sequences(pretrained, length, count)


def layer_inputs(pretrained: Pretrained, item: Sequence[int]) -> list[LayerInputs]:
    """The queries, keys and values of each attention layer."""
    with recorded(pretrained.model) as calls:
        pretrained.forward([item])
    return calls


# ---------------------------------------------------------------------- what comes out


def results(scale: SpectrumScale, records: JobResults) -> Results:
    """Curves, heat maps, and the paper's statements about them."""
    names = names_of(scale)
    by_source = {names[source]: records[key(source)] for source in sources(scale)}
    index = heat_map_index(scale.length)
    lowest = min(min(map(min, at_index(eigenvalues, index))) for eigenvalues in by_source.values())
    low = min(0.9, math.floor(10 * lowest) / 10)
    return Results(
        summary=f"Y(j) is the share of the j largest singular values of a head's N×N attention weights in the sum of "
        f"all; N = {scale.length}, means over {scale.sequences} sequences. A matrix whose singular values are all "
        f"equal has Y({index}) = {index / scale.length:.2f}. `{UNTRAINED}` is the same model with random weights.",
        tables=[_all(by_source, index), _by_layer(by_source, index)],
        plots=[
            *(_curves(names[text], by_source, scale.length) for text in scale.texts),
            *(_heat_map(source, eigenvalues, index, low) for source, eigenvalues in by_source.items()),
        ],
    )


def names_of(scale: SpectrumScale) -> dict[str, str]:
    """The names of the texts: the folder that each is in, or all of its path where several are in one."""
    paths = {source: Path(source) for source in sources(scale)}
    folders = {source: path.parent.name or path.stem for source, path in paths.items()}
    counts = Counter(folders.values())
    return {source: folder if counts[folder] == 1 else slug(source) for source, folder in folders.items()}


def at_index(eigenvalues: Mapping[str, Any], index: int) -> list[list[float]]:
    """Y at one j, by layer and head."""
    column = eigenvalues["at"].index(index)
    return [[curve[column] for curve in layer] for layer in eigenvalues["curves"]]


def _all(by_source: Mapping[str, Mapping[str, Any]], index: int) -> Table:
    rows = []
    for source, eigenvalues in by_source.items():
        shares, needed = at_index(eigenvalues, index), [count for layer in eigenvalues["needed"] for count in layer]
        heads = [share for layer in shares for share in layer]
        half = len(shares) // 2
        lower, upper = (statistics.fmean(map(statistics.fmean, part)) for part in (shares[:half], shares[half:]))
        row = [statistics.fmean(heads), min(heads), max(heads)]
        rows.append(
            [
                source,
                *(f"{share:.3f}" for share in row),
                f"{statistics.median(needed):.0f}",
                f"{lower:.3f}",
                f"{upper:.3f}",
            ]
        )
    columns = ["mean", "lowest head", "highest head", "j with Y(j) = 0.9, median head", "lower layers", "upper layers"]
    return Table(
        title=f"Y({index}) of all layers and heads",
        columns=["", *columns],
        rows=rows,
        note="The paper, of RoBERTa: a long tail of small singular values, most of the matrix in the first few; and "
        '"the spectrum distribution in higher layers is more skewed than in lower layers", so that the last column '
        "should be above the one before it. Attention of a model with random weights is nearly uniform and has a low "
        "rank too: a low rank alone does not prove learning.",
    )


def _by_layer(by_source: Mapping[str, Mapping[str, Any]], index: int) -> Table:
    layers = len(next(iter(by_source.values()))["curves"])
    rows = []
    for source, eigenvalues in by_source.items():
        rows.append([source, *(f"{statistics.fmean(layer):.3f}" for layer in at_index(eigenvalues, index))])
    return Table(title=f"Y({index}) by layer, mean of its heads", columns=["", *map(str, range(layers))], rows=rows)


def _curves(source: str, by_source: Mapping[str, Mapping[str, Any]], length: int) -> Lines:
    """The median of each layer's heads, and of all heads of the model with random weights."""
    eigenvalues, baseline = by_source[source], by_source[UNTRAINED]
    series = {
        f"layer {layer}": _median(eigenvalues["at"], curves) for layer, curves in enumerate(eigenvalues["curves"])
    }
    series[UNTRAINED] = _median(baseline["at"], [curve for curves in baseline["curves"] for curve in curves])
    series["all equal"] = [(0.0, 0.0), (float(length), 1.0)]
    return Lines(
        file=f"curves-{source}",
        title=f"share of the largest singular values, {source}: each layer's median head",
        x="j",
        y="Y(j)",
        series=series,
    )


def _median(at: Sequence[int], curves: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    return [(float(j), statistics.median(values)) for j, values in zip(at, zip(*curves, strict=True), strict=True)]


def _heat_map(source: str, eigenvalues: Mapping[str, Any], index: int, low: float) -> HeatMap:
    values = at_index(eigenvalues, index)
    return HeatMap(
        file=f"heat-map-{source}",
        title=f"Y({index}) of each head, {source}",
        x="head",
        y="layer",
        columns=[str(head) for head in range(len(values[0]))],
        rows=[str(layer) for layer in range(len(values))],
        values=values,
        low=low,
    )


EXPERIMENT = Experiment(
    name="spectrum",
    title="The spectrum of attention's weights in a pretrained encoder",
    source="Wang et al. 2020, figure 1, section 3",
    deviations=(
        "In small all-MiniLM-L6-v2 (6 layers of 12 heads of 32), which the extra `demo` carries, in place of RoBERTa.",
        "WikiText-2 and movie reviews (Pang and Lee 2004) in place of WikiText-103 and IMDB.",
        "In addition, the model with random weights, which the paper does not show.",
    ),
    scales=SCALES,
    cells=cells,
    results=results,
    needs=lambda scale: folders(scale.model, (), scale.texts),
)
