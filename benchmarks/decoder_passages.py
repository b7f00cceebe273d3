"""Shared code of the scripts about decoders: passages of books, and methods compared with exact attention on them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

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


def passages(pretrained: Pretrained, data: Path, length: int, count: int) -> list[Passage]:
    """`count` passages of exactly `length` tokens, from the books in turn, from their middle outwards."""
    books = []
    for book, name in BOOKS.items():
        text = read(pretrained, [(data / "gutenberg" / name).read_text("utf-8")], 512, 1, 0)
        items = text.sequences(pretrained, length, STARTS)
        books.append([Passage(book, at, items[at]) for at in (3, 1, 5, 2, 4)])
    return [passage for of_books in zip(*books, strict=True) for passage in of_books][:count]


def next_tokens(pretrained: Pretrained, passage: Passage, methods: Mapping[str, Method]) -> dict[str, NextTokens]:
    """The next tokens of exact attention, named "exact", and of each method, over one passage."""
    runs = {"exact": pretrained.prefill([passage.tokens])}
    for name, method in methods.items():
        with running(pretrained.model, method):
            runs[name] = pretrained.prefill([passage.tokens])
    return pretrained.next_tokens([passage.tokens], runs, "exact")


def errors(pretrained: Pretrained, passage: Passage, methods: Mapping[str, Method]) -> dict[str, list[float]]:
    """The error of each method's attention in `LAYERS`, on the inputs that exact attention has."""
    with recorded(pretrained.model) as calls:
        pretrained.prefill([passage.tokens])
    exact = [calls[layer].run(Full()) for layer in LAYERS]
    return {
        name: [relative_error(calls[layer].run(method), out) for layer, out in zip(LAYERS, exact, strict=True)]
        for name, method in methods.items()
    }


def next_token_texts(sums: Sequence[NextTokens]) -> list[str]:
    """The cells of a table about next tokens, under `HEAD`, over some passages."""
    total = summed(sums)
    last = max(total.last_kl / total.last_count, 0.0)
    return [f"{total.perplexity:.2f}", f"{total.mean_kl:.5f}", f"{last:.5f}", f"{total.agreement:.4f}"]


def error_texts(numbers: Sequence[Sequence[float]]) -> list[str]:
    """The cells of a table of errors: the mean of some passages in each layer, and that of the layers."""
    layers = [sum(layer) / len(layer) for layer in zip(*numbers, strict=True)]
    return [f"{error:.4f}" for error in (*layers, sum(layers) / len(layers))]


def count_of(count: int) -> str:
    """The number of passages, in words."""
    return "one passage" if count == 1 else f"{count} passages"
