"""Is "clustered-tail" closer to exact attention than "i-clustered" at equal work outside the demo encoder on speeches?

    python benchmarks/beyond_encoder.py [--data FOLDER] [--settings "speech reviews images"] [--lengths "512 1024"]
                                        [--scale small] [--models FOLDER] [--out FILE.md]

FOLDER holds fsdd, movie_reviews and fashion_mnist; the default is the environment variable SUBQUAD_DATA. Every model
learned with exact attention and is run with each method as it is: models of spoken digits and of images are trained
here, the encoder of reviews is that of the demo extra. `--lengths` are those of the
reviews. `--models` keeps trained models, and what is there is not
trained again. `--scale smoke` only shows that everything runs: its models have learned nothing.
"""

import copy
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import sheet
import torch
from clustered_tail_settings import exact_products, products
from image_patches import PatchClassifier, Patches
from torch import Tensor

import subquad as sq
from subquad import hf
from subquad.core.spelling import nearest
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.selection.group_means import group_mean
from subquad.methods import parse_method
from subquad.methods.clustered import SPACES
from subquad.methods.clustered_tail import OF_ITEM, by_length
from subquad.research.papers import speech
from subquad.research.papers.base import Context, slug
from subquad.research.training.models.ctc_encoder import CTCEncoder
from subquad.research.training.run import evaluate, read_saved
from subquad.research.training.settings import ModelSettings, RunSettings, TrainingSettings
from subquad.tools.compare.labelled_tasks import Probe, load_task, share_right
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.measure.fidelity import attention_weights, cosine, relative_error
from subquad.tools.models.pretrained import load, running

METHODS = (
    "full",
    "clustered:clusters=100",
    "clustered:clusters=200",
    *(
        f"i-clustered:clusters={clusters},topk={topk}"
        for clusters, topk in ((25, 32), (50, 32), (100, 32), (100, 64), (100, 128), (200, 32), (200, 64), (200, 128))
    ),
    *(
        f"i-clustered:clusters={clusters},topk={topk},space=logits,refine=2"
        for clusters, topk in ((50, 32), (100, 32), (100, 64))
    ),
    "clustered-tail",
    *(
        f"clustered-tail:clusters={clusters},topk={topk},cells={cells}"
        for clusters, topk, cells in (
            *((16, 32, 16), (32, 32, 16), (32, 64, 32), (64, 64, 32)),
            *((32, 128, 16), (64, 128, 16), (100, 64, 32)),
        )
    ),
)
SCORED = (  # methods whose task is measured too, which takes most of the time
    *("full", "clustered:clusters=100"),
    *("i-clustered:clusters=100,topk=32", "i-clustered:clusters=100,topk=64", "i-clustered:clusters=200,topk=64"),
    *("i-clustered:clusters=100,topk=64,space=logits,refine=2",),
    *("clustered-tail", "clustered-tail:clusters=100,topk=64,cells=32"),
)
SMOKE_METHODS = ("full", "i-clustered:clusters=4,topk=2", "clustered-tail:clusters=4,topk=4,cells=2")
LENGTHS = (512, 1024)  # of reviews
BEST = (1, 8, 32, 128)  # keys whose share of the weight is told

SHAPE = ModelSettings(layers=2, heads=2, width=64, feed_forward=128, dropout=0.0, positions="learned")
IMAGES = (  # two runs, the first on every fourth pixel, which takes a seventh of the time
    RunSettings(
        task=Patches(stride=2, train=2500, validation=250),
        model=SHAPE,
        training=TrainingSettings(steps=1500, batch=16, learning_rate=2e-3, warmup=50, every=500),
    ),
    RunSettings(
        task=Patches(train=2500, validation=250),
        model=SHAPE,
        training=TrainingSettings(steps=120, batch=16, learning_rate=1e-3, warmup=10, every=60),
    ),
)
SMOKE_IMAGES = tuple(
    RunSettings(
        task=Patches(stride=stride, train=2980, validation=10),
        model=ModelSettings(layers=1, heads=1, width=16, feed_forward=16, dropout=0.0, positions="learned"),
        training=TrainingSettings(steps=2, batch=4),
    )
    for stride in (7, 4)
)

ABOUT = """\
Each model learned with exact attention and is run with every method as it is, in all layers.
Multiply-adds are those of the attention calls in percent of exact attention's, the choice of clusters and cells \
included; as in clustered-tail-settings.md they do not count comparisons, exponentials and k-means on hashes.
The error is ‖out − exact‖ / ‖exact‖ of one layer's attention on the inputs that exact attention gives it, mean of \
layers and of a few items.
`clustered-tail` without settings has C = √(2n), k = √(8n) and 32 cells.

A second table of each setting compares at equal work: to the error of every `clustered-tail` belongs the least error \
of an `i-clustered` of the first table that has no more multiply-adds, as published or with clusters in the space of \
the logits.
A ratio below 1 says that `clustered-tail` is closer to exact attention.

A third table shows how exact attention is spread in the first item: the weight of a query's best keys, and the \
weight that it has on the √(8n) keys that the mean of its cluster attends to most, in √(2n) clusters of the queries as \
published, and in the space of the logits."""


class Figures(NamedTuple):
    """The figures of one method in one setting."""

    share: float  # of exact attention's multiply-adds
    error: float
    task: Mapping[str, float]


@dataclass(frozen=True)
class Setting:
    """A trained model with real inputs."""

    title: str
    about: str  # what was trained, and on what it is measured
    model: Any
    calls: Sequence[LayerInputs]  # of a few items without padding, all layers
    score: Callable[[], Mapping[str, float]]  # of the model with whatever runs in it


@dataclass(frozen=True)
class Scale:
    """Sizes of what is trained and measured."""

    recipe: speech.Recipe
    images: tuple[RunSettings, ...]  # each run starts from the model of the one before
    methods: tuple[str, ...]
    scored: tuple[str, ...]
    train: int  # tokens of the reviews that the probe learns from
    test: int  # tokens of the reviews that are scored
    items: int  # whose layers' errors are measured


SCALES = {
    "small": Scale(speech.SMALL, IMAGES, METHODS, SCORED, train=300 * 512, test=240 * 512, items=2),
    "smoke": Scale(speech.SMOKE, SMOKE_IMAGES, SMOKE_METHODS, SMOKE_METHODS, train=16 * 512, test=4 * 512, items=1),
}


class Place(NamedTuple):
    """The folders of data and models, and the lengths of the reviews."""

    data: Path
    models: Path
    lengths: Sequence[int]


# ---------------------------------------------------------------------- settings


def of_speech(scale: Scale, place: Place) -> Iterator[Setting]:
    """Connected digits: the model of the experiment `approximation-matrix` that learned with exact attention."""
    for cell in speech.model_cells(scale.recipe, ["full"], 0):
        folder = place.models / slug(cell.key)
        if not (folder / "model").is_dir():
            cell.run(Context(folder, place.data, "cpu", quiet, tuple(cell.after)))
    model = read_saved(CTCEncoder, place.models / slug(speech.model_key("full", 0)) / "model").eval()
    settings = scale.recipe.settings("full", 0)
    test = settings.task.splits(place.data).test
    longest = sorted((test[i] for i in range(len(test))), key=lambda item: -len(item["features"]))
    batches = [settings.task.collate([item]) for item in longest[: scale.items]]
    about = (
        f"Connected spoken digits (fsdd), {len(test)} utterances; digit errors of known speakers and of another, "
        "layers of the longest."
    )
    score = partial(test_figures, settings, model, place)
    yield Setting("Speech", about, model, inputs(model, batches), score)


def of_images(scale: Scale, place: Place) -> Iterator[Setting]:
    """Fashion-MNIST pixel by pixel, by a small vision transformer."""
    before = None
    for number, settings in enumerate(scale.images):
        key = f"images {number}"
        if not (place.models / slug(key) / "model").is_dir():
            after = () if before is None else (before,)
            speech.fit(settings, before, Context(place.models / slug(key), place.data, "cpu", quiet, after))
        before = key
    model = read_saved(PatchClassifier, place.models / slug(key) / "model").eval()
    test = settings.task.splits(place.data).test
    batches = [settings.task.collate([test[i]]) for i in range(scale.items)]
    about = (
        f"Fashion-MNIST, a token for each pixel, projected from the {settings.task.window} × {settings.task.window} "
        f"pixels around it; {len(test)} images."
    )
    score = partial(test_figures, settings, model, place)
    yield Setting("Images", about, model, inputs(model, batches), score)


def of_reviews_at(length: int, scale: Scale, place: Place) -> Setting:
    """Reviews of at least this many tokens, cut to it, in the demo encoder.

    A probe learns from exact embeddings and judges those of each method.
    """
    own, task = load(None), load_task("movie-reviews", place.data)
    if length > own.limit:
        own = own.with_model(hf.extend_positions(copy.deepcopy(own.model), length))
    order = random.Random(0).sample(range(len(task.texts)), len(task.texts))
    wanted = {True: scale.train // length, False: scale.test // length}  # by whether the probe may learn from it
    items: dict[bool, list[list[int]]] = {True: [], False: []}
    labels: dict[bool, list[str]] = {True: [], False: []}
    for i in order:
        learned = i < task.train
        if len(items[learned]) < wanted[learned]:
            item = own.wrap(own.content_ids(task.texts[i]), length)
            if len(item) == length:
                items[learned].append(item)
                labels[learned].append(task.labels[i])
    vectors = {learned: own.embed_all(each) for learned, each in items.items()}
    probe = Probe(vectors[True], labels[True])

    def score() -> dict[str, float]:
        found = own.embed_all(items[False])
        right = share_right(probe.predict(found), labels[False])
        return {"accuracy": right, "cosine": float(cosine(found, vectors[False]).mean())}

    with recorded(own.model) as calls:
        for item in items[False][: scale.items]:
            own.forward([item])
    about = (
        f"Movie reviews of {length:,} tokens or more, cut to {length:,}; a logistic probe on the exact embeddings of "
        f"{len(items[True])}, accuracy on {len(items[False])} others and mean cosine of their embeddings to the exact."
    )
    return Setting(f"Reviews, {length:,} tokens", about, own.model, calls, score)


def of_reviews(scale: Scale, place: Place) -> Iterator[Setting]:
    """The demo encoder at each length."""
    return (of_reviews_at(length, scale, place) for length in place.lengths)


SETTINGS: dict[str, Callable[[Scale, Place], Iterator[Setting]]] = {
    "speech": of_speech,
    "reviews": of_reviews,
    "images": of_images,
}


def quiet(what: str, done: int, total: int) -> None:
    """Training reports its progress here."""


def test_figures(settings: RunSettings, model: Any, place: Place) -> Mapping[str, float]:
    """The test figures of the task."""
    with tempfile.TemporaryDirectory() as scratch:
        return evaluate(settings, model, Path(scratch), data=place.data)


@torch.no_grad()
def inputs(model: Any, batches: Sequence[Mapping[str, Tensor]]) -> list[LayerInputs]:
    """Queries, keys and values of all layers, item by item."""
    with recorded(model) as calls:
        for batch in batches:
            model(**{name: given for name, given in batch.items() if name != "labels"})
    return calls


# ---------------------------------------------------------------------- measurement


def cost(method: sq.Method, tokens: int, width: int) -> float:
    """Multiply-adds a query and head, counted as in `clustered_tail_settings.products`."""
    if isinstance(method, sq.Full):
        return exact_products(tokens, width)
    if isinstance(method, sq.ClusteredTail):
        clusters, topk = (
            by_length(n, growth, tokens, None)[0]
            for n, growth in zip((method.clusters, method.topk), OF_ITEM, strict=True)
        )
        return products(width, clusters, topk, min(method.cells, tokens), method.refine, method.bits)
    if isinstance(method, sq.Clustered | sq.ImprovedClustered):
        clusters = min(method.clusters, tokens)
        met = min(method.topk, tokens) if isinstance(method, sq.ImprovedClustered) else 0
        space = 2 * width**2 if method.space == "logits" else 0
        return space + method.bits * width + (method.refine + 2) * clusters * width + 2 * met * width
    raise ValueError(f"the multiply-adds of {method} are not known")


@torch.no_grad()
def measured(setting: Setting, methods: Sequence[str], scored: Sequence[str]) -> dict[str, Figures]:
    """The figures of each method, with those of the task for methods that are `scored`."""
    exact = [call.run(sq.Full()) for call in setting.calls]
    found = {}
    for text in methods:
        method = parse_method(text)
        errors, shares = [], []
        for call, wanted in zip(setting.calls, exact, strict=True):
            tokens, width = call.query.shape[2:]
            errors.append(relative_error(call.run(method), wanted))
            shares.append(cost(method, tokens, width) / exact_products(tokens, width))
        figures: Mapping[str, float] = {}
        if text in scored:
            with running(setting.model, method):
                figures = setting.score()
        found[text] = Figures(statistics.fmean(shares), statistics.fmean(errors), figures)
        print(setting.title, text, found[text], flush=True)
    return found


def at_equal_work(figures: Mapping[str, Figures]) -> list[list[str]]:
    """Rows: each clustered-tail beside the best i-clustered that has no more multiply-adds."""
    rows = []
    for text, ours in figures.items():
        if not text.startswith("clustered-tail"):
            continue
        line = [f"`{text}`", percent(ours.share), f"{ours.error:.3f}"]
        for logits in (False, True):
            others = {
                name: each.error
                for name, each in figures.items()
                if name.startswith("i-clustered") and each.share <= ours.share and (logits or "logits" not in name)
            }
            best = min(others, key=others.__getitem__, default=None)
            line += (
                [sheet.MISSING] * 3
                if best is None
                else [f"`{best}`", f"{others[best]:.3f}", f"{ours.error / others[best]:.2f}"]
            )
        rows.append(line)
    return rows


@torch.no_grad()
def spread(calls: Sequence[LayerInputs]) -> list[list[str]]:
    """Rows: for each layer, the weight of a query's best keys and of its cluster's top keys, in the first item."""
    rows = []
    for number, call in {call.number: call for call in reversed(calls)}.items():
        weights = attention_weights(sq.Full(), call.query, call.key, call.value, **call.options)
        best = weights.topk(min(BEST[-1], weights.shape[-1])).values.cumsum(-1).mean((0, 1, 2))
        of_best = [best[min(k, len(best)) - 1] for k in BEST]
        covered = [reached(call, weights, space) for space in SPACES]
        rows.append([str(number), *(percent(float(share)) for share in [*of_best, *covered])])
    return rows[::-1]


def reached(call: LayerInputs, weights: Tensor, space: str) -> float:
    """Share of a query's `weights` that the top keys of its cluster have, with the numbers of clustered-tail."""
    tokens = call.query.shape[2]
    clusters, topk = (by_length(0, growth, tokens, None)[0] for growth in OF_ITEM)
    kind = sq.ImprovedClustered if space == "queries" else sq.ClusteredTail
    how = {name: kind.defaults()[name] for name in ("bits", "iterations", "refine", "seed")}
    labels = query_clusters(call.query, call.key, None, None, space=space, clusters=clusters, **how)
    top = (group_mean(call.query, labels, clusters) @ call.key.mT).topk(topk).indices
    own = top.gather(2, labels[..., None].expand(*labels.shape, top.shape[-1]))  # of each query's cluster
    return float(weights.gather(-1, own).sum(-1).mean())


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def task_text(figures: Mapping[str, float]) -> list[str]:
    """Cells of the task's figures, without the loss."""
    shown = {name: value for name, value in figures.items() if name != "loss"}
    return [f"{value:.4f}" if name == "cosine" else percent(value) for name, value in shown.items()]


def section(setting: Setting, figures: Mapping[str, Figures]) -> list[str]:
    """Tables of one setting."""
    tokens = sorted({call.query.shape[2] for call in setting.calls})
    counts = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    heads, _, width = setting.calls[0].query.shape[1:]
    facts = f"{counts} tokens in the items whose layers are measured, {heads} heads of {width}."
    names = [name.replace("_", " ") for name in figures["full"].task if name != "loss"]
    rows = [
        [f"`{text}`", percent(each.share), f"{each.error:.3f}", *(task_text(each.task) or [sheet.MISSING] * len(names))]
        for text, each in figures.items()
    ]
    equal = ["clustered-tail", "multiply-adds", "error"]
    equal += ["best i-clustered, as published", "error", "ratio", "best i-clustered", "error", "ratio"]
    best = [f"best {k}" if k > 1 else "best key" for k in BEST]
    return [
        f"## {setting.title}",
        f"{setting.about}\n{facts}",
        sheet.table(["method", "multiply-adds", "error", *names], rows),
        "At equal work:",
        sheet.table(equal, at_equal_work(figures)),
        "The exact attention:",
        sheet.table(["layer", *best, *(f"clusters of {space}" for space in SPACES)], spread(setting.calls)),
    ]


def main(
    lengths: tuple[int, ...] = LENGTHS,
    settings: tuple[str, ...] = tuple(SETTINGS),
    scale: str = "small",
    models: Path | None = None,
    data: Path = sheet.DATA_OR_LOCAL,
    out: Path | None = None,
) -> None:
    for names, known, what in ((settings, SETTINGS, "setting"), ([scale], SCALES, "scale")):
        for name in names:
            if name not in known:
                raise SystemExit(f"no {what} {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    parts = [ABOUT]
    with tempfile.TemporaryDirectory() as scratch:
        place, size = Place(data, models or Path(scratch), lengths), SCALES[scale]
        for name in settings:
            for setting in SETTINGS[name](size, place):
                parts += section(setting, measured(setting, size.methods, size.scored))
    sheet.publish("Beyond the encoder", parts, out)


if __name__ == "__main__":
    sheet.run(main)
