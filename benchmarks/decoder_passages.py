"""What the scripts about decoders share: passages of books, and next tokens of methods beside those of exact attention.

What is measured is appended to a file as it is made, one JSON object a line; what is there is not measured again.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from subquad.methods import Method
from subquad.tools.models.next_tokens import NextTokens, summed
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, running

MODEL = "demo-decoder"
BOOKS = {"Moby-Dick": "Moby-Dick--Or-The-Whale_2701.txt", "Great Expectations": "Great-Expectations_1400.txt"}
FOLDER = os.environ.get("SUBQUAD_DATA", "")
SPREAD = (
    7  # evenly spread starts of passages of a book; the first, its preface, and the last, its licence, are not read
)
HEAD = ("perplexity", "KL", "KL, last quarter", "same top token")


class Passage(NamedTuple):
    """A stretch of a book, as tokens."""

    book: str
    number: int
    tokens: list[int]


def passages(pretrained: Pretrained, data: str, length: int, count: int) -> list[Passage]:
    """`count` passages of exactly `length` tokens, from the books in turn, from their middle outwards."""
    found = []
    for book, name in BOOKS.items():
        text = read(pretrained, [(Path(data) / "gutenberg" / name).read_text("utf-8")], 512, 1, 0)
        items = text.sequences(pretrained, length, SPREAD)
        found.append([Passage(book, at, items[at]) for at in (3, 1, 5, 2, 4)])
    return [passage for of_books in zip(*found, strict=True) for passage in of_books][:count]


def measured(
    pretrained: Pretrained, passage: Passage, methods: Mapping[str, str | Method], figures: Path | None
) -> dict[str, NextTokens]:
    """The next tokens of exact attention, named "exact", and of each method, over one passage."""
    known = dict(_read(figures, passage)) if figures is not None and figures.exists() else {}
    missing = {name: method for name, method in methods.items() if name not in known}
    if missing or "exact" not in known:
        runs = {"exact": pretrained.prefill([passage.tokens])}
        for name, method in missing.items():
            with running(pretrained.model, method):
                runs[name] = pretrained.prefill([passage.tokens])
        new = pretrained.next_tokens([passage.tokens], runs, "exact")
        known |= new
        if figures is not None:
            append(figures, passage, new)
    return {name: known[name] for name in ("exact", *methods)}


def rows(
    pretrained: Pretrained, chosen: Sequence[Passage], methods: Mapping[str, str | Method], figures: Path | None
) -> list[list[str]]:
    """A row for exact attention and for each method, over all of the passages: its name, and `HEAD`."""
    found = [measured(pretrained, passage, methods, figures) for passage in chosen]
    return [[name, *figures_of(summed([each[name] for each in found]))] for name in ("exact", *methods)]


def count_of(count: int) -> str:
    """The number of passages, in words."""
    return "one passage" if count == 1 else f"{count} passages"


def _read(figures: Path, passage: Passage) -> Iterator[tuple[str, NextTokens]]:
    for line in figures.read_text("utf-8").splitlines():
        row = json.loads(line)
        if (row["book"], row["number"], row["tokens"]) == (passage.book, passage.number, len(passage.tokens)):
            yield row["method"], NextTokens(*row["sums"])


def append(figures: Path, passage: Passage, sums: Mapping[str, NextTokens]) -> None:
    """Write what was measured over a passage at the end of a file."""
    about = {"book": passage.book, "number": passage.number, "tokens": len(passage.tokens)}
    with figures.open("a", encoding="utf-8") as file:
        for name, each in sums.items():
            file.write(json.dumps({**about, "method": name, "sums": each.sums()}) + "\n")


def figures_of(sums: NextTokens) -> list[str]:
    """What a table shows of next tokens, under `HEAD`."""
    last = sums.last_kl / sums.last_count if sums.last_count else 0.0
    return [f"{sums.perplexity:.2f}", f"{sums.mean_kl:.5f}", f"{max(last, 0.0):.5f}", f"{sums.agreement:.4f}"]
