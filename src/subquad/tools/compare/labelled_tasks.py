"""Labelled tasks: what an embedding model's attention costs on something that people measure."""

import csv
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.core.errors import InputError
from subquad.core.reading import exists, is_folder
from subquad.core.spelling import instead
from subquad.tools.data.labelled import read_labelled
from subquad.tools.data.reviews import read_reviews
from subquad.tools.data.tables import TAB, fields_of
from subquad.tools.data.texts import field_of, read_rows, read_text

Example = TypeVar("Example")


@dataclass(frozen=True)
class LabelledTask:
    """Texts to embed, and how embeddings become scores.

    Those that are scored by a probe have a label for each text; the first `train` of them are for the probe to learn.
    """

    name: str
    metric: str
    texts: list[str]
    examples: int  # labelled ones: texts, pairs or questions
    score: Callable[[Tensor], dict[str, float]]
    baselines: dict[str, float] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)
    train: int = 0
    wanted: Sequence[float | int] = ()  # of others: the score of each pair, the passage of each question


class Probe:
    """A logistic regression from embeddings, brought to length 1, to labels."""

    def __init__(self, vectors: Float[Tensor, "n width"], labels: Sequence[str]):
        from sklearn.linear_model import LogisticRegression

        self._fitted = LogisticRegression(C=10.0, max_iter=300).fit(self._unit(vectors), labels)

    def predict(self, vectors: Float[Tensor, "n width"]) -> list[str]:
        """A label for each."""
        return [str(label) for label in self._fitted.predict(self._unit(vectors))]

    def coefficients(self) -> tuple[Any, Any]:
        """Weights (labels, width) and biases (labels), of the sorted labels; of two labels one row, the second's."""
        return self._fitted.coef_, self._fitted.intercept_

    @staticmethod
    def _unit(vectors: Tensor) -> Any:
        return torch.nn.functional.normalize(vectors, dim=-1).numpy()


def share_right(predicted: Sequence[str], labels: Sequence[str]) -> float:
    """Accuracy."""
    return sum(mine == its for mine, its in zip(predicted, labels, strict=True)) / len(labels)


def load_task(name: str, data: Path | None, examples: int | None = None) -> LabelledTask:
    """A task by name, with its data from a folder (or a file); of more than `examples` rows, a random sample.

    Raises:
        InputError: an unknown task, no data folder, or data that is missing or malformed.
    """
    if name not in TASKS:
        raise InputError(f"no task {name!r}{instead(name, TASKS, '')}")
    if data is None:
        raise InputError(f"task {name!r} needs its data: --data-dir FOLDER, or the environment variable SUBQUAD_DATA")
    if not exists(data):
        raise InputError(f"no data folder at {data}")
    if examples is not None and examples < 2:
        raise InputError(f"examples {examples} is too few: give at least 2")
    return TASKS[name](data, examples)


def _some(rows: list[Example], total: int, examples: int | None) -> list[Example]:
    """The share of these rows that leaves `examples` of all `total` rows, in their order; always the same ones."""
    if examples is None or examples >= total:
        return rows
    count = max(1, len(rows) * examples // total)
    return [rows[i] for i in sorted(random.Random(0).sample(range(len(rows)), count))]


def _banking77(data: Path, examples: int | None) -> LabelledTask:
    train, test = (_labelled_csv(_find(data, "banking77", f"{part}.csv")) for part in ("train", "test"))
    return _probe("banking77", "intent accuracy of a logistic probe on frozen embeddings", train, test, examples)


def _movie_reviews(data: Path, examples: int | None) -> LabelledTask:
    """2,000 reviews in NLTK's archive; cv000-cv799 train, cv800-cv999 test, of each class."""
    archive = _find(data, "movie_reviews", "movie_reviews.zip")
    reviews = read_reviews(archive)
    train = [(review.text, review.label) for review in reviews if review.number < 800]
    test = [(review.text, review.label) for review in reviews if review.number >= 800]
    if not train or not test:
        raise InputError(
            f"{archive} contains {len(train)} reviews before cv800 and {len(test)} from it on; both are needed"
        )
    return _probe("movie-reviews", "accuracy of a logistic probe on frozen embeddings", train, test, examples)


def _sts(data: Path, examples: int | None) -> LabelledTask:
    """A TSV without header: sentence, sentence, score."""
    path = _find(data, "sts", "sts.tsv")
    rows = [row for _, row in fields_of(path, read_text(path), delimiter=TAB, quoting=csv.QUOTE_NONE)]
    rows = _some(rows, len(rows), examples)
    try:
        gold = [float(row[2]) for row in rows]
    except (IndexError, ValueError):
        raise InputError(f"{path}: each line must be sentence, sentence, score, divided by tabs") from None

    if len(set(gold)) < 2:
        raise InputError(f"{path}: all scores are alike; a rank correlation needs different ones")

    def score(vectors: Tensor) -> dict[str, float]:
        from scipy.stats import spearmanr

        similarity = torch.nn.functional.cosine_similarity(vectors[0::2], vectors[1::2])
        return {"spearman": float(spearmanr(similarity.numpy(), gold).statistic)}

    return LabelledTask(
        "sts",
        "Spearman correlation of cosines with scores",
        [s for row in rows for s in row[:2]],
        len(rows),
        score,
        wanted=gold,
    )


def _retrieval(data: Path, examples: int | None) -> LabelledTask:
    """A .jsonl (or .csv, .tsv) of rows with a question and the passage that answers it."""
    path = _first(data / "retrieval.jsonl", data / "retrieval" / "retrieval.jsonl") if is_folder(data) else data
    rows = [_filled(path, number, row, ("question", "passage")) for number, row in read_rows(path)]
    if not rows:
        raise InputError(f"{path} has a header, but no rows")
    rows = _some(rows, len(rows), examples)
    passages = list(dict.fromkeys(passage for _, passage in rows))
    wanted = torch.tensor([passages.index(passage) for _, passage in rows])

    def score(vectors: Tensor) -> dict[str, float]:
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
        best = (vectors[len(passages) :] @ vectors[: len(passages)].T).argmax(1)
        return {"recall@1": float((best == wanted).float().mean())}

    return LabelledTask(
        "retrieval",
        "recall@1",
        passages + [question for question, _ in rows],
        len(rows),
        score,
        wanted=wanted.tolist(),
    )


def _labelled_tables(data: Path, examples: int | None) -> LabelledTask:
    """Tables of the user's own."""
    train, test = (read_labelled([_find(data, "labelled", f"{part}.csv")]) for part in ("train", "test"))
    return _probe("labelled", "accuracy of a logistic probe on frozen embeddings", train, test, examples)


TASKS: dict[str, Callable[[Path, int | None], LabelledTask]] = {
    "banking77": _banking77,
    "movie-reviews": _movie_reviews,
    "sts": _sts,
    "retrieval": _retrieval,
    "labelled": _labelled_tables,
}


def _probe(
    name: str, metric: str, train: list[tuple[str, str]], test: list[tuple[str, str]], examples: int | None
) -> LabelledTask:
    total = len(train) + len(test)
    train, test = _some(train, total, examples), _some(test, total, examples)
    if len({label for _, label in train}) < 2:
        raise InputError(f"the training part of {name} has one class only; a probe needs two")
    labels = [label for _, label in train + test]
    majority = max(set(labels), key=labels.count)

    count = len(train)

    def score(vectors: Tensor) -> dict[str, float]:
        probe = Probe(vectors[:count], labels[:count])
        return {"accuracy": share_right(probe.predict(vectors[count:]), labels[count:])}

    chance = sum(label == majority for _, label in test) / len(test)
    texts = [text for text, _ in train + test]
    return LabelledTask(name, metric, texts, len(texts), score, {"majority class": chance}, labels, count)


def _labelled_csv(path: Path) -> list[tuple[str, str]]:
    rows = [_filled(path, number, row, ("text", "category")) for number, row in read_rows(path)]
    if not rows:
        raise InputError(f"{path} has a header, but no rows")
    return rows


def _filled(path: Path, number: int, row: dict[str, object], columns: tuple[str, str]) -> tuple[str, str]:
    """Two fields of a row, neither of them empty."""
    if not row.keys() >= set(columns):
        first, second = columns
        raise InputError(
            f"{path}, line {number}: needs the columns {first!r} and {second!r}; it has {', '.join(map(str, row))}"
        )
    one, other = (field_of(path, number, row, column) for column in columns)
    if not one.strip() or not other.strip():
        raise InputError(f"{path}, line {number}: no {columns[0] if other.strip() else columns[1]} in it")
    return one, other


def _find(data: Path, folder: str, file: str) -> Path:
    """The file itself, in the task's own folder, or in a folder of many tasks' data."""
    return _first(data / folder / file, data / file) if is_folder(data) else data


def _first(*candidates: Path) -> Path:
    for path in candidates:
        if exists(path):
            return path
    raise InputError(f"no {candidates[0].name} at {' or '.join(str(path) for path in candidates)}")
