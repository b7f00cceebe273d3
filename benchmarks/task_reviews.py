"""Classification of long reviews: is a movie review positive or negative?

The reviews are the longest ones, as many of each class; a longer one than the length is cut. Each is labelled by a
logistic probe on frozen embeddings that learned from the other four fifths of the reviews.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from task_cells import EXACT, FIRST, MEAN, Cell, Figures, attention, compared, interval
from task_retrieval import CHUNKS, chunk_vectors, model_length

from subquad.core.errors import InputError
from subquad.tools.compare.labelled_tasks import Probe
from subquad.tools.data.reviews import read_reviews
from subquad.tools.models.pretrained import Pretrained
from subquad.tools.runs.jobs import Progress

FOLDS = 5
LABELS = ("pos", "neg")


@dataclass(frozen=True)
class LabelledReview:
    """A review as content tokens."""

    tokens: list[int]
    label: str


def longest_reviews(pretrained: Pretrained, data: Path, count: int) -> list[LabelledReview]:
    """The longest reviews, `count` in all, positive and negative ones in turn.

    Raises:
        InputError: the count is too small for the folds, or there are fewer reviews.
    """
    if count < 2 * FOLDS:
        raise InputError(f"--reviews {count} is too few for {FOLDS} folds of two classes; give at least {2 * FOLDS}")
    reviews = read_reviews(data / "movie_reviews" / "movie_reviews.zip")
    every = [LabelledReview(pretrained.content_ids(review.text), review.label) for review in reviews]
    every.sort(key=lambda review: -len(review.tokens))
    classes = [[review for review in every if review.label == label][: count // 2] for label in LABELS]
    if any(len(reviews) < count // 2 for reviews in classes):
        raise InputError(f"--reviews {count}, but there are {len(every):,} reviews, not all of them of each class")
    return [review for pair in zip(*classes, strict=True) for review in pair]


def longest_length(pretrained: Pretrained, reviews: Sequence[LabelledReview]) -> int:
    """Tokens of the longest review, special ones included."""
    return max(len(review.tokens) for review in reviews) + len(pretrained.wrap([], model_length(pretrained)))


@dataclass(frozen=True)
class Classification:
    """The task at one length; chunks go through the model with its own positions."""

    pretrained: Pretrained
    methods: Sequence[str]
    length: int
    reviews: Sequence[LabelledReview]
    name: str = "classification"

    @property
    def rows(self) -> list[str]:
        """Exact attention, what needs no longer positions if reviews are longer than the model's, the methods."""
        chunked = (FIRST, MEAN) if self.length > model_length(self.pretrained) else ()
        return [EXACT, *chunked, *self.methods]

    def inputs(self) -> object:
        """The reviews."""
        return [self.length, [[review.tokens, review.label] for review in self.reviews]]

    def measure(self, row: str, progress: Progress) -> Cell:
        """The embedding of each review."""
        length = model_length(self.pretrained) if row in (FIRST, MEAN) else self.length
        stretched, vectors = self.pretrained.reaching(length), []
        with attention(stretched, EXACT if row in (FIRST, MEAN) else row):
            for number, review in enumerate(self.reviews):
                progress("reviews", number, len(self.reviews))
                if row == MEAN:
                    vectors.append(chunk_vectors(self.pretrained, self._cut(review)).mean(0).tolist())
                else:
                    vectors += stretched.embed([stretched.wrap(review.tokens, length)]).tolist()
        return vectors

    def _cut(self, review: LabelledReview) -> list[int]:
        """The content tokens of a review that the other rows see."""
        return review.tokens[: self.length - len(self.pretrained.wrap([], self.length))]

    def about(self) -> str:
        """Describe the reviews and how they were labelled, one sentence a line."""
        sizes = sorted(len(self.pretrained.wrap(each.tokens, self.length)) for each in self.reviews)
        lines = [
            f"The {len(self.reviews)} longest reviews, half of them positive, cut at {self.length:,} tokens: "
            f"{sizes[0]:,} to {sizes[-1]:,} tokens, {sizes[len(sizes) // 2]:,} in the median.",
            f"A logistic probe on frozen embeddings labels each of {FOLDS} parts after learning from the others.",
            *([CHUNKS] if self.length > model_length(self.pretrained) else []),
            "Same label: the share of reviews with the label that exact attention leads to.",
        ]
        return "\n".join(lines)

    def figures(self, cell: Cell, exact: Cell) -> dict[str, Figures]:
        """The accuracy, and the share of the labels that are exact attention's."""
        labels, its = self.predicted(cell), self.predicted(exact)
        same = [float(mine == other) for mine, other in zip(labels, its, strict=True)]
        return {"": {**compared("accuracy", self._right(labels), self._right(its)), "same label": interval(same)}}

    def predicted(self, vectors: Cell) -> list[str]:
        """Each review's label by a probe that learned from the other folds; a pair of both classes is in one fold."""
        embeddings, labels = torch.tensor(vectors), [review.label for review in self.reviews]
        fold = [number // len(LABELS) % FOLDS for number in range(len(labels))]
        predicted = [""] * len(labels)
        for held_out in range(FOLDS):
            train, test = ([at for at, its in enumerate(fold) if (its == held_out) == held] for held in (False, True))
            probe = Probe(embeddings[train], [labels[at] for at in train])
            for at, label in zip(test, probe.predict(embeddings[test]), strict=True):
                predicted[at] = label
        return predicted

    def _right(self, predicted: Sequence[str]) -> list[float]:
        return [float(mine == review.label) for mine, review in zip(predicted, self.reviews, strict=True)]
