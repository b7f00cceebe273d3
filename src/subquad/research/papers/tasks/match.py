"""Match: were two passages, byte by byte, taken from one document? In place of LRA's retrieval of papers (AAN)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from subquad.core.errors import InputError
from subquad.research.training.byte_tokenizer import BYTES
from subquad.research.training.folders import find_data
from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.models.encoder import EncoderClassifier
from subquad.research.training.tasks.classification import Classification, padded
from subquad.research.training.tasks.task import Batch, Item, Metrics, Splits
from subquad.tools.data.documents import read_archive
from subquad.tools.data.texts import read_documents

READ = 1000  # training pairs that the baselines learn from
SHARES = (0.7, 0.15, 0.15)  # of the documents: to learn from, to choose by, to report on


@dataclass(frozen=True, kw_only=True)
class Match(Classification):
    """Predict whether two passages are from one document; half of the pairs are.

    Passages begin at random places and do not overlap, and each document is in one split only. The classes of a pair
    are 0, "different", and 1, "same".

    Attributes:
        source: "movie_reviews" (2,000 documents) or "state_union" (65 long speeches).
        files: your own text files or folders in place of `source`; each file, or row of a table, is a document.
        length: number of bytes in a passage; documents with fewer than two passages are left out. LRA uses 4,000.
        examples: number of training pairs, which are made as they are read.
        held_out: number of validation pairs, and of test pairs.
        seed: random seed of the splits and the pairs.
    """

    name: ClassVar[str] = "match"
    summary: ClassVar[str] = "bytes of two passages; accuracy of whether they are from one document"
    summary_of_files: ClassVar[str] = "bytes of two passages of {files}; accuracy of whether they are from one document"
    needs: ClassVar[str | None] = "movie_reviews"
    start: ClassVar = {
        "model": {"layers": 4, "heads": 4, "width": 128, "feed_forward": 256},
        "training": {"steps": 5000, "batch": 16, "warmup": 200, "schedule": "cosine", "every": 500},
    }

    source: Literal["movie_reviews", "state_union"] = "movie_reviews"
    files: tuple[str, ...] = ()
    length: int = 512
    examples: int = 20_000
    held_out: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "examples", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, but it must be at least 1")

    def splits(self, data: Path | None = None) -> Splits:
        """Pairs of the documents that each split has; `data` is not read where `files` are given."""
        documents = self._documents(data)
        order = np.random.default_rng(self.seed).permutation(len(documents))
        ends = np.round(np.cumsum((0.0, *SHARES)) * len(documents)).astype(int)
        parts = [[documents[i] for i in order[a:b]] for a, b in pairwise(ends)]
        if min(map(len, parts)) < 2:
            raise InputError(
                f"{len(documents)} documents of {2 * self.length:,} bytes or more are too few for three splits of two "
                f"or more: give a smaller task.length than {self.length}, or more documents"
            )
        sizes = (self.examples, self.held_out, self.held_out)
        return Splits(*(Pairs(self, i, part, size) for i, (part, size) in enumerate(zip(parts, sizes, strict=True))))

    def model(self, settings: ModelSettings) -> EncoderClassifier:
        """An encoder of bytes that compares what it pools of two passages."""
        return self.classifier(settings, ("different", "same"), BYTES, self.length, pairs=True)

    def collate(self, items: Sequence[Item]) -> Batch:
        """The first passages, the second ones, and whether they are from one document."""
        first, second = padded([i["input_ids"] for i in items]), padded([i["pair_ids"] for i in items])
        labels = torch.tensor([item["labels"] for item in items])
        return {**first, "pair_ids": second["input_ids"], "labels": labels}

    def baselines(self, splits: Splits, data: Path | None = None) -> dict[str, Metrics]:
        """The baselines are a guess, and classifiers by the similarity of the passages' bytes and of their words."""
        from sklearn.feature_extraction.text import CountVectorizer, TfidfVectorizer

        train, test = splits.train, splits.test
        assert isinstance(train, Pairs)
        assert isinstance(test, Pairs)
        pairs = [[part.pair(i) for i in range(min(READ, len(part)))] for part in (train, test)]
        bags = {
            "similar bytes": CountVectorizer(analyzer="char", lowercase=False, decode_error="replace"),
            "similar words": TfidfVectorizer(sublinear_tf=True, decode_error="replace", token_pattern=r"\w+|[^\w\s]"),
        }
        return {"guess": {"accuracy": 0.5}} | {name: _similar(bag, *pairs) for name, bag in bags.items()}

    def _documents(self, data: Path | None) -> list[bytes]:
        if self.files:
            texts = read_documents([Path(path) for path in self.files])
        else:
            archive = find_data(data, self.source, f"{self.source}.zip", "the task 'match'")
            texts = list(read_archive(archive).values())
        documents = [text.encode("utf-8", errors="replace") for text in texts]
        return [document for document in documents if len(document) >= 2 * self.length]


class Pairs(Dataset[Item]):
    """Pair i of a split, made from the seed, the split and i; every second one is of one document."""

    def __init__(self, task: Match, split: int, documents: Sequence[bytes], count: int):
        self.task, self.split, self.documents, self.count = task, split, documents, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        first, second, same = self.pair(index)
        ids = [self.task.tokens(np.frombuffer(passage, dtype=np.uint8)) for passage in (first, second)]
        return {"input_ids": ids[0], "pair_ids": ids[1], "labels": same}

    def contents_to_compare(self) -> Iterator[bytes]:
        """All documents."""
        return iter(self.documents)

    def pair(self, index: int) -> tuple[bytes, bytes, int]:
        """Two passages, and 1 where they are of one document."""
        task, same = self.task, index % 2
        draw = np.random.default_rng((task.seed, 1 + self.split, index))
        chosen = [self.documents[i] for i in draw.choice(len(self.documents), 2, replace=False)]
        cuts = [self._cuts(document, draw) for document in chosen]
        other = 0 if same else 1
        first, second = cuts[0][0], cuts[other][1]
        pair = [chosen[0][first : first + task.length], chosen[other][second : second + task.length]]
        if draw.random() < 0.5:
            pair.reverse()
        return pair[0], pair[1], same

    def _cuts(self, document: bytes, draw: np.random.Generator) -> tuple[int, int]:
        """The starts of two passages of a document that do not overlap."""
        length = self.task.length
        free = np.sort(draw.integers(0, len(document) - 2 * length + 1, 2))
        return int(free[0]), int(free[1]) + length


def _similar(bag: Any, train: Sequence[tuple[bytes, bytes, int]], test: Sequence[tuple[bytes, bytes, int]]) -> Metrics:
    """The accuracy of calling pairs the same from that cosine of their bags on that divides training pairs best."""
    bag.fit([passage for first, second, _ in train for passage in (first, second)])
    cosines, labels = zip(*(_cosines(bag, pairs) for pairs in (train, test)), strict=True)
    order = np.argsort(cosines[0])
    below = np.concatenate([[0], np.cumsum(labels[0][order] == 0)])  # correct, by pairs below the threshold
    above = np.concatenate([np.cumsum((labels[0][order] == 1)[::-1])[::-1], [0]])
    position = int((below + above).argmax())
    threshold = np.concatenate([[-np.inf], cosines[0][order]])[position]
    return {"accuracy": float(np.mean((cosines[1] > threshold) == (labels[1] == 1)))}


def _cosines(bag: Any, pairs: Sequence[tuple[bytes, bytes, int]]) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.preprocessing import normalize

    first, second = (normalize(bag.transform([pair[i] for pair in pairs])) for i in (0, 1))
    return np.asarray(first.multiply(second).sum(1)).ravel(), np.array([pair[2] for pair in pairs])
