"""Does it pay to keep the first token exact, or the first and the last?

    python benchmarks/keep.py [--data FOLDER] [--lengths "512 2048"] [--passages 6] [--rounds 9] [--out FILE.md]

FOLDER holds state_union/; the default is the environment variable SUBQUAD_DATA. The demo encoder (the `demo` extra)
embeds the beginning of the latest speeches with each method in all layers, without and with kept tokens.
"""

import copy
import statistics
from functools import partial
from pathlib import Path

import sheet
import speeches
import torch

from subquad import hf
from subquad.methods import parse_method
from subquad.tools.measure.fidelity import cosine
from subquad.tools.measure.timing import timed_rounds

METHODS = (
    "local:window=64", "local:window=128", "local:window=256", "smyrf", "i-clustered:clusters=25,topk=32",
    "i-clustered:clusters=100,topk=32", "clustered-tail:clusters=64,topk=64,cells=16",
)  # fmt: skip
KEPT = {"keep nothing": None, "`first`": "first", "`ends`": "ends"}
HEAD = ["method", *(f"cosine, {kept}" for kept in KEPT), *(f"time, {kept}" for kept in KEPT)]
ABOUT = """\
The cosine is that of the demo encoder's embeddings to the exact ones, mean of passages, when the method runs in all \
layers and keeps no token exact, the first one, or the first and the last one. The passages are the beginnings of the \
latest State of the Union speeches; beyond 512 tokens, the encoder's positions are interpolated.
The time is that of the whole model for one passage, divided by the time of the same model with exact attention: the \
ratio of the medians of {rounds} rounds, in each of which both run once."""


def row(method: str, read: speeches.Passages, exact: list[torch.Tensor], rounds: int) -> list[str]:
    """The cosines of a method, and its times, with each choice of kept tokens."""
    cosines, times = [], []
    for keep in KEPT.values():
        model = copy.deepcopy(read.model.model)
        hf.swap(model, parse_method(method), keep=keep)
        swapped = read.model.with_model(model)
        pairs = zip(read.items, exact, strict=True)
        cosines.append(statistics.mean(float(cosine(swapped.embed([item]), want)) for item, want in pairs))
        calls = {"exact": partial(read.model.embed, read.items[:1]), "ours": partial(swapped.embed, read.items[:1])}
        seconds = {name: statistics.median(own) for name, own in timed_rounds(calls, rounds).items()}
        times.append(seconds["ours"] / seconds["exact"])
    return [f"`{method}`", *(f"{each:.3f}" for each in cosines), *(f"{each:.2f}" for each in times)]


def main(
    lengths: tuple[int, ...] = (512, 2048),
    data: Path = sheet.DATA_OR_LOCAL,
    passages: int = 6,
    rounds: int = 9,
    methods: tuple[str, ...] = METHODS,
    out: Path | None = None,
) -> None:
    parts = [ABOUT.format(rounds=rounds)]
    with torch.inference_mode():
        for length in lengths:
            read = speeches.passages(data, length, passages)
            exact = [read.model.embed([item]) for item in read.items]
            rows = [row(method, read, exact, rounds) for method in methods]
            parts += [f"## {length:,} tokens, {len(read.items)} passages", sheet.table(HEAD, rows)]
    sheet.publish("Kept tokens in the demo encoder", parts, out)


if __name__ == "__main__":
    sheet.run(main)
