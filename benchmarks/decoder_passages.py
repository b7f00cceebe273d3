"""What the scripts about decoders share: passages of books, and methods beside exact attention on them.

What is measured is appended to a file as it is made, one JSON object a line; what is there is not measured again.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import sheet

from subquad.methods import Full, Method
from subquad.tools.measure.capture import recorded
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.models.next_tokens import NextTokens, summed
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, running

MODEL = "demo-decoder"
BOOKS = {"Moby-Dick": "Moby-Dick--Or-The-Whale_2701.txt", "Great Expectations": "Great-Expectations_1400.txt"}
STARTS = 7  # evenly spread in a book; the first and the last, its preface and its licence, are not read
LAYERS = (0, 7, 15, 22, 29)  # whose error is measured
HEAD = ("perplexity", "KL", "KL, last quarter", "same top token")


class Passage(NamedTuple):
    """A stretch of a book, as tokens."""

    book: str
    number: int
    tokens: list[int]


class Figures:
    """Lists of numbers of a passage and a method, in a file where one is named."""

    def __init__(self, path: Path | None):
        self.path = path
        lines = path.read_text("utf-8").splitlines() if path is not None and path.exists() else []
        self.numbers = {tuple(key): numbers for key, numbers in map(json.loads, lines)}

    def read(self, kind: str, passage: Passage, method: str) -> list[float] | None:
        """The numbers of a kind; None where they are not known."""
        return self.numbers.get(self._key(kind, passage, method))

    def write(self, kind: str, passage: Passage, numbers: Mapping[str, Sequence[float]]) -> None:
        """Keep the numbers of some methods."""
        rows = {self._key(kind, passage, method): list(each) for method, each in numbers.items()}
        self.numbers |= rows
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.items())

    def _key(self, kind: str, passage: Passage, method: str) -> tuple[str, str, int, int, str]:
        return kind, passage.book, passage.number, len(passage.tokens), method


def options(text: str, lengths: Sequence[int], **others: object) -> argparse.ArgumentParser:
    """Options of these scripts."""
    parser = sheet.arguments(text, lengths, data=os.environ.get("SUBQUAD_DATA", ""), passages=2, **others)
    parser.add_argument("--figures", type=Path)
    return parser


def passages(pretrained: Pretrained, data: str, length: int, count: int) -> list[Passage]:
    """`count` passages of exactly `length` tokens, from the books in turn, from their middle outwards."""
    books = []
    for book, name in BOOKS.items():
        text = read(pretrained, [(Path(data) / "gutenberg" / name).read_text("utf-8")], 512, 1, 0)
        items = text.sequences(pretrained, length, STARTS)
        books.append([Passage(book, at, items[at]) for at in (3, 1, 5, 2, 4)])
    return [passage for of_books in zip(*books, strict=True) for passage in of_books][:count]


def next_tokens(
    pretrained: Pretrained, passage: Passage, methods: Mapping[str, Method], figures: Figures
) -> dict[str, NextTokens]:
    """The next tokens of exact attention, named "exact", and of each method, over one passage."""
    kind, names = "next tokens", ("exact", *methods)
    missing = [name for name in names if figures.read(kind, passage, name) is None]
    if missing:
        runs = {"exact": pretrained.prefill([passage.tokens])}
        for name in missing:
            if name != "exact":
                with running(pretrained.model, methods[name]):
                    runs[name] = pretrained.prefill([passage.tokens])
        new = pretrained.next_tokens([passage.tokens], runs, "exact")
        figures.write(kind, passage, {name: sums.sums() for name, sums in new.items()})
    return {name: NextTokens(*(figures.read(kind, passage, name) or ())) for name in names}


def errors(
    pretrained: Pretrained, passage: Passage, methods: Mapping[str, Method], figures: Figures
) -> dict[str, list[float]]:
    """Of each method, the error of the attention in `LAYERS`, on the inputs that exact attention has."""
    missing = [name for name in methods if figures.read("errors", passage, name) is None]
    if missing:
        with recorded(pretrained.model) as calls:
            pretrained.prefill([passage.tokens])
        exact = [calls[layer].run(Full()) for layer in LAYERS]
        for name in missing:
            outs = (calls[layer].run(methods[name]) for layer in LAYERS)
            numbers = [relative_error(*both) for both in zip(outs, exact, strict=True)]
            figures.write("errors", passage, {name: numbers})
    return {name: figures.read("errors", passage, name) or [] for name in methods}


def next_token_texts(sums: Sequence[NextTokens]) -> list[str]:
    """What a table shows of next tokens, under `HEAD`, over some passages."""
    total = summed(sums)
    last = max(total.last_kl / total.last_count, 0.0)
    return [f"{total.perplexity:.2f}", f"{total.mean_kl:.5f}", f"{last:.5f}", f"{total.agreement:.4f}"]


def error_texts(numbers: Sequence[Sequence[float]]) -> list[str]:
    """What a table shows of errors: the mean of some passages in each layer, and that of the layers."""
    layers = [sum(layer) / len(layer) for layer in zip(*numbers, strict=True)]
    return [f"{error:.4f}" for error in (*layers, sum(layers) / len(layers))]


def count_of(count: int) -> str:
    """The number of passages, in words."""
    return "one passage" if count == 1 else f"{count} passages"
