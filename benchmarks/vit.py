"""A vision transformer of up to 3,137 tokens, trained here with exact attention: what other attention changes.

    python benchmarks/vit.py [FOLDER] [--weights MODEL] --out FILE.md

The model is Hugging Face's ViTForImageClassification. It reads pages of 4 × 4 pictures of Fashion-MNIST, or of 2 × 2,
in patches of 2 × 2 pixels, and says which kind of clothing half of the pictures show. FOLDER holds fashion_mnist; the
default is the environment variable SUBQUAD_DATA. The model is trained first; with --weights it is read from that
folder, or trained and saved there. `--scale smoke` only shows that everything runs: its model learns nothing.
"""

import copy
import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import mosaics
import numpy as np
import sheet
import torch
import typer
from jaxtyping import Float, Int
from mosaics import Pages, Pictures, Stage
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import ViTForImageClassification

import subquad as sq
from subquad.core.spelling import nearest
from subquad.tools.measure.fidelity import cosine
from subquad.tools.measure.timing import speedup, timed_rounds

EXACT = "exact"
METHODS = (
    "full:kernel=subquad",
    "clustered-tail",
    "clustered-tail:clusters=64,topk=96",
    "clustered-tail:topk=384,cells=64",
    "i-clustered",
    "local",
)
LENGTHS = (785, 3137)
RESAMPLES = 10_000  # of the pages, for the confidence intervals
HEAD = ("tokens", "method", "cosine", "cosine, class token", "agreement", "accuracy", "minus exact", "speed")

ABOUT = """\
A page is made of pictures of Fashion-MNIST (28 × 28 pixels, some mirrored): 4 × 4 of them, which are 3,136 patches of \
2 × 2 pixels and a class token, or 2 × 2, which are 785 tokens.
Half of the pictures show one of ten kinds of clothing, the others other kinds, each at most a quarter of the pictures.
The model ({layers} layers, {heads} heads of {width}, {parameters:,} parameters) says which kind half of them show; \
guesses are right in 10 %.
It learned with exact attention, from single pictures, then from pages of 2 × 2 and of 4 × 4 ({trained}), and runs \
with every method as it is, in all layers.

{pages} pages of each size, with {test} pictures that no page of the training showed.
Cosine: of the final states to those of exact attention, mean over all tokens, and that of the class token alone, \
which the answer is read from.
Agreement: the share of answers that are exact attention's; accuracy: the share that is right.
In brackets: 95 % intervals by {resamples:,} resamples of the pages; the difference is taken page by page.
Speed of the whole model, one page at a time: the median of the ratios exact / method over {turns} turns, each of \
which runs all of them once in a new order.
A page takes {seconds} with exact attention (SDPA)."""


class Scale(NamedTuple):
    """Sizes of the model, and how long it learns."""

    width: int
    layers: int
    heads: int
    stages: tuple[Stage, ...]


# From single pictures to whole pages: a page costs a hundred times a picture, and shapes are learned from pictures.
SCALES = {
    "small": Scale(64, 4, 2, (Stage(1, 1000, 32, 2e-3), Stage(2, 200, 16, 1e-3), Stage(4, 60, 8, 1e-3))),
    "smoke": Scale(32, 1, 1, (Stage(1, 2, 2, 1e-3), Stage(2, 1, 1, 1e-3), Stage(4, 1, 1, 1e-3))),
}


class Answers(NamedTuple):
    """The outputs of a model for all pages."""

    states: list[Float[Tensor, "N D"]]
    kinds: Int[Tensor, " pages"]


def trained(scale: Scale, learning: Pictures, folder: Path | None) -> tuple[ViTForImageClassification, str]:
    """The model and how long it learned, read from a folder; where nothing is there, trained, and saved to it."""
    if folder and (folder / "config.json").is_file():
        return ViTForImageClassification.from_pretrained(folder).eval(), f"before this run, saved in `{folder}`"
    torch.manual_seed(0)
    model, started = mosaics.new_model(scale.width, scale.layers, scale.heads), time.monotonic()
    mosaics.train(model, learning, scale.stages, partial(print, flush=True))
    if folder:
        model.save_pretrained(folder)
    return model, f"{time.monotonic() - started:.0f} s"


def grid_of(tokens: int) -> int:
    """Pictures a side of the page that has so many tokens."""
    grids = {mosaics.tokens(grid): grid for grid in range(1, mosaics.GRID + 1)}
    if tokens not in grids:
        raise SystemExit(f"no page has {tokens:,} tokens; pages have {', '.join(f'{each:,}' for each in grids)}")
    return grids[tokens]


def running(model: ViTForImageClassification, method: str, grid: int) -> Callable[[Tensor], Mapping[str, Tensor]]:
    """A copy of the model with this attention, on one page of grid × grid pictures."""
    own = copy.deepcopy(model)
    if method != EXACT:
        sq.hf.swap(own, method)
    embeddings = own.vit.embeddings
    embeddings.position_embeddings = nn.Parameter(mosaics.window(embeddings.position_embeddings, grid))

    @torch.inference_mode()
    def run(page: Tensor) -> Mapping[str, Tensor]:
        states = own.vit(page[None], interpolate_pos_encoding=True).last_hidden_state
        return {"states": states[0], "logits": own.classifier(states[0, 0])}

    return run


def answers(run: Callable[[Tensor], Mapping[str, Tensor]], pages: Pages) -> Answers:
    """The final states of all pages and the answers."""
    results = [run(page) for page in pages.pixels]
    return Answers([each["states"] for each in results], torch.stack([each["logits"].argmax() for each in results]))


def interval(each_page: NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the mean of a figure of each page, by the bootstrap (Efron 1979, percentiles)."""
    draw = np.random.default_rng(0)
    picked = draw.integers(0, len(each_page), (RESAMPLES, len(each_page)))
    low, high = np.percentile(each_page[picked].mean(1), (2.5, 97.5))
    return float(low), float(high)


def signed(share: float) -> str:
    """A difference in percent; one that rounds to 0 has no minus."""
    return f"{round(share, 3) + 0.0:+.1%}"


def row(tokens: int, method: str, approximate: Answers, exact: Answers, pages: Pages, speed: float) -> list[str]:
    """A method's figures."""
    right, exact_right = ((each.kinds == pages.kinds).double().numpy() for each in (approximate, exact))
    cosines = [cosine(a, b) for a, b in zip(approximate.states, exact.states, strict=True)]
    low, high = interval(right)
    difference = right - exact_right
    less, more = interval(difference)
    return [
        f"{tokens:,}",
        f"`{method}`",
        f"{statistics.mean(float(each.mean()) for each in cosines):.4f}",
        f"{statistics.mean(float(each[0]) for each in cosines):.4f}",
        f"{float((approximate.kinds == exact.kinds).double().mean()):.1%}",
        f"{right.mean():.1%} ({low:.1%} to {high:.1%})",
        sheet.MISSING if method == EXACT else f"{signed(difference.mean())} ({signed(less)} to {signed(more)})",
        f"{speed:.2f}×",
    ]


def timed(calls: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Seconds of each call, turn by turn."""
    timed_rounds(calls, 1)  # what the first call takes longer
    return timed_rounds(calls, turns, random.Random(0))


def main(
    folder: Annotated[Path, typer.Argument()] = sheet.DATA,
    lengths: tuple[int, ...] = LENGTHS,
    methods: tuple[str, ...] = METHODS,
    turns: int = 15,
    pages: int = 200,
    weights: Path | None = None,
    scale: str = "small",
    out: Path | None = None,
) -> None:
    """Train or read the model, measure, and print or write the table."""
    if scale not in SCALES:
        raise SystemExit(f"no scale {scale!r}{nearest(scale, SCALES)}; there are {', '.join(SCALES)}")
    grids = {tokens: grid_of(tokens) for tokens in lengths}
    learning, test = mosaics.read(folder)
    rows, took = [], []
    model, training = trained(SCALES[scale], learning, weights)
    for tokens, grid in grids.items():
        sample = mosaics.pages(test, grid, pages, random.Random(1))
        runs = {name: running(model, name, grid) for name in (EXACT, *methods)}
        seconds = timed({name: partial(run, sample.pixels[0]) for name, run in runs.items()}, turns)
        took.append(f"{1e3 * statistics.median(seconds[EXACT]):.0f} ms at {tokens:,} tokens")
        exact = answers(runs[EXACT], sample)
        for name, run in runs.items():
            speed = speedup(seconds[name], seconds[EXACT])
            rows.append(row(tokens, name, answers(run, sample), exact, sample, speed))
            print(*rows[-1], flush=True)
    config = model.config
    about = ABOUT.format(
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        width=config.hidden_size // config.num_attention_heads,
        parameters=model.num_parameters(),
        trained=training,
        pages=pages,
        test=len(test.labels),
        resamples=RESAMPLES,
        turns=turns,
        seconds=" and ".join(took),
    )
    sheet.publish("A vision transformer: pages of pictures", [about, sheet.table(HEAD, rows)], out)


if __name__ == "__main__":
    sheet.run(main)
