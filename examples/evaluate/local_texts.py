"""The data of the tasks in this folder, made of texts on this machine: nothing is downloaded.

Each function gets the harness' `--metadata` as arguments, of which it reads its own:

    texts        a file or folder of .txt, .md, .rst, .jsonl, .csv or .tsv files; without it, the texts are the
                 documentation of Python's standard library, which differs a little between Python's versions
    characters   of a document, or of a passage
    items        documents or passages, at most
"""

import random
import re
from pathlib import Path
from typing import Any

from datasets import Dataset

from subquad.tools.data.texts import read_documents, standard_library

CHOICES = 4
SENTENCE_END = re.compile(r"\s([a-z]{4,})\.\s")


def documents(texts: str | None = None, characters: int = 30_000, items: int = 4, **_: Any) -> dict[str, Dataset]:
    """The longest documents, each cut to a number of characters."""
    return {"test": Dataset.from_list([{"text": text[:characters]} for text in _longest(texts)[:items]])}


def last_words(texts: str | None = None, characters: int = 12_000, items: int = 24, **_: Any) -> dict[str, Dataset]:
    """Passages with a least number of characters, up to the last word of a sentence, and four words to choose from."""
    rows: list[dict[str, Any]] = []
    chance = random.Random(0)
    for text in _longest(texts):
        ends = list(SENTENCE_END.finditer(text))
        words = sorted({end[1] for end in ends})
        start = 0
        for end in ends:
            if end.start() - start >= characters and len(words) >= CHOICES:
                others = chance.sample([word for word in words if word != end[1]], CHOICES - 1)
                choices = chance.sample([end[1], *others], CHOICES)
                passage = text[start : end.start()]
                rows.append({"passage": passage, "choices": choices, "answer": choices.index(end[1])})
                start = end.end()
    return {"test": Dataset.from_list(rows[:items])}


def likelihoods(document: dict[str, str], results: tuple[float]) -> dict[str, tuple[float, int]]:
    """The log-likelihood of a document with its number of words, and of bytes."""
    text = document["text"]
    return {"word_perplexity": (results[0], len(text.split())), "bits_per_byte": (results[0], len(text.encode()))}


def _longest(texts: str | None) -> list[str]:
    found = standard_library() if texts is None else read_documents([Path(texts)])
    return sorted(found, key=len, reverse=True)
