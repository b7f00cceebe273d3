"""Text, byte by byte: which class is it? Movie reviews in place of LRA's IMDb, or labelled texts of the user's own."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from subquad.core.errors import InputError
from subquad.research.training.byte_tokenizer import BYTES, byte_tokenizer
from subquad.research.training.folders import find_data
from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.models.encoder import EncoderClassifier
from subquad.research.training.tasks.classification import (
    CLASS_TOKEN,
    FIRST,
    PADDING,
    Classification,
    OneClass,
    bag_of_words,
    majority,
    padded,
)
from subquad.research.training.tasks.task import Batch, Item, Metrics, Splits, several
from subquad.tools.data.labelled import Labelled, hold_out, read_labelled
from subquad.tools.data.reviews import read_reviews
from subquad.tools.data.texts import NoColumn

LOOKED_AT = 2000  # texts whose length is counted before training
REVIEWS = ("neg", "pos")
Three = tuple[Labelled, Labelled, Labelled]  # to learn from, to choose by, to report on


@dataclass(frozen=True, kw_only=True)
class LabelledTexts(OneClass):
    """Texts with a label each: which rows are learned from, and baselines that know no attention.

    Attributes:
        length: how much of each text is read; the rest is cut off.
        files: your own tables.
        validation_files, test_files: further tables for validation and for the test figures.
        held_out: share of `files` that is held out for validation, and again for the test, unless these have their own
            files.
        text_column, label_column: the columns of the tables that hold the texts and the labels.
        seed: random seed of the rows that are held out.
    """

    needs: ClassVar[str | None] = "movie_reviews"
    unit: ClassVar[str] = "tokens"
    pipeline: ClassVar[str | None] = "text-classification"

    length: int
    files: tuple[str, ...] = ()
    validation_files: tuple[str, ...] = ()
    test_files: tuple[str, ...] = ()
    held_out: float = 0.1
    text_column: str = "text"
    label_column: str = "label"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.held_out < 0.5:
            raise ValueError(f"held_out={self.held_out}, but it must be more than 0 and less than 0.5")
        if (self.validation_files or self.test_files) and not self.files:
            raise ValueError("validation_files and test_files go with files, the tables to learn from; give those, too")

    @abstractmethod
    def ids(self, text: str) -> NDArray[np.int64]:
        """A text as the tokens of a model's input."""

    @abstractmethod
    def cut(self, text: str) -> str:
        """The part of a text that a model reads."""

    @abstractmethod
    def size(self, text: str) -> int:
        """The number of tokens of a text before it is cut."""

    @property
    def longest(self) -> int:
        """The number of tokens of a text that are read."""
        return self.length

    def notes(self, splits: Splits) -> list[str]:
        """A note on the number of texts that are cut, of at most `LOOKED_AT`."""
        texts = [text for part in vars(splits).values() for text in part.texts]
        some = texts[:: -(-len(texts) // LOOKED_AT)]
        sizes = [self.size(text) for text in some]
        cut = sum(size > self.longest for size in sizes)
        if not cut:
            return []
        what = "texts" if len(some) == len(texts) else "texts looked at"
        return [
            f"{cut:,} of {len(some):,} {what} are cut to {self.longest:,} {self.unit}, the longest of {max(sizes):,}: "
            "--set task.length=N reads more"
        ]

    def encode(self, texts: Sequence[str]) -> Batch:
        """Texts as the input of a trained model: `model(**task.encode(texts)).logits`.

        Raises:
            TypeError: a single text, not in a list.
        """
        return padded([self.ids(text) for text in several(texts)], padding=self.padding)

    def splits(self, data: Path | None = None) -> Splits:
        """The texts; `data` is not read where `files` are given."""
        labels = self.labels()
        return Splits(*(Texts(self, rows, labels) for rows in (self._parts() if self.files else _reviews(data))))

    def labels(self) -> list[str]:
        """The classes, in their order; of the user's own tables, those to learn from have them all."""
        return sorted({label for _, label in self._parts()[0]}) if self.files else list(REVIEWS)

    def baselines(self, splits: Splits, data: Path | None = None) -> dict[str, Metrics]:
        """The baselines are the most frequent label and a bag of words.

        The bag of words reads the same part of each text as the model; if texts are cut off, a second bag of words
        reads the whole texts.
        """
        train, test = splits.train, splits.test
        assert isinstance(train, Texts)
        assert isinstance(test, Texts)
        rows = {"majority class": majority(train.labels, test.labels)}
        cut = [[self.cut(text) for text in texts] for texts in (train.texts, test.texts)]
        rows["bag of words"] = bag_of_words(cut[0], train.labels, cut[1], test.labels)
        if cut != [train.texts, test.texts]:
            rows["bag of words, whole texts"] = bag_of_words(train.texts, train.labels, test.texts, test.labels)
        return rows

    def _parts(self) -> Three:
        """The user's tables, with what is held out of the first."""
        try:
            train, validation, test = (
                read_labelled([Path(path) for path in files], self.text_column, self.label_column)
                for files in (self.files, self.validation_files, self.test_files)
            )
        except NoColumn as error:
            raise InputError(f"{error}; name the columns with --set task.text_column and task.label_column") from None
        if not test:
            train, test = hold_out(train, self.held_out, self.seed)
        if not validation:
            validation_share = self.held_out if self.test_files else self.held_out / (1 - self.held_out)
            train, validation = hold_out(train, validation_share, self.seed + 1)
        _check(train, validation, test, ", ".join(self.files))
        return train, validation, test


@dataclass(frozen=True, kw_only=True)
class Text(LabelledTexts, Classification):
    """Predict the label of a text from its bytes.

    Without `files`, the texts are movie reviews, which are positive or negative (Pang and Lee 2004). For each class,
    reviews cv000 to cv699 are for training, cv700 to cv799 for validation and cv800 to cv999 for the test. With
    `files`, the texts are rows of .csv, .tsv or .jsonl files, with any labels.

    Attributes:
        length: number of bytes that are read of each text; the rest is cut off. LRA uses 4,000.
    """

    name: ClassVar[str] = "text"
    unit: ClassVar[str] = "bytes"
    summary: ClassVar[str] = "bytes of a text (movie reviews, or task.files: labelled tables); accuracy of its label"
    summary_of_files: ClassVar[str] = "bytes of the texts in {files}; accuracy of their labels"
    start: ClassVar = {
        "model": {"layers": 2, "heads": 4, "width": 128, "feed_forward": 256},
        "training": {"steps": 600, "batch": 16, "warmup": 60, "schedule": "cosine", "every": 100},
    }

    length: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise ValueError(f"length={self.length}, but at least 1 byte must be read")

    def model(self, settings: ModelSettings) -> EncoderClassifier:
        """An encoder of bytes, whose config names the labels."""
        return self.classifier(settings, self.labels(), BYTES, self.length)

    def size(self, text: str) -> int:
        """The number of bytes of a text."""
        return len(text.encode("utf-8", errors="replace"))

    @property
    def tokenizer(self) -> Any:
        """Gives the tokens that `ids` gives."""
        start = ("<class>", CLASS_TOKEN) if self.pooling == "class-token" else None
        longest = self.length + (start is not None)
        return byte_tokenizer(FIRST, longest, pad=("<pad>", PADDING), start=start)

    def ids(self, text: str) -> NDArray[np.int64]:
        """The first bytes of a text as tokens."""
        return self.tokens(bytes_of(text, self.length))

    def cut(self, text: str) -> str:
        """The part of a text that the model reads."""
        return cut_to(text, self.length)


class Texts(Dataset[Item]):
    """Labelled texts, as tokens when they are read."""

    def __init__(self, task: LabelledTexts, rows: Labelled, labels: Sequence[str]):
        self.task = task
        self.texts = [text for text, _ in rows]
        self.labels = [labels.index(label) for _, label in rows]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Item:
        return {"input_ids": self.task.ids(self.texts[index]), "labels": self.labels[index]}

    def contents_to_compare(self) -> Iterator[bytes]:
        """All texts, whole, and their labels."""
        yield np.asarray(self.labels, dtype=np.int64).tobytes()
        for text in self.texts:
            yield text.encode("utf-8", errors="surrogatepass")


def bytes_of(text: str, length: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """The first `length` bytes of a text in UTF-8."""
    return np.frombuffer(text.encode("utf-8", errors="replace")[:length], dtype=np.uint8)


def cut_to(text: str, length: int) -> str:
    """The text that the first `length` bytes hold; a letter that is cut in two is left out."""
    return text.encode("utf-8", errors="replace")[:length].decode("utf-8", errors="ignore")


def _reviews(data: Path | None) -> Three:
    if data is None:
        raise InputError(
            "the task 'text' needs its data: --data-dir FOLDER, or the environment variable SUBQUAD_DATA, for movie "
            "reviews; or a table of your own, --set task.files=mine.csv"
        )
    archive = find_data(data, "movie_reviews", "movie_reviews.zip", "the task 'text'")
    reviews = read_reviews(archive)
    parts = [
        [(review.text, review.label) for review in reviews if first <= review.number < end]
        for first, end in ((0, 700), (700, 800), (800, 1000))
    ]
    if not all(parts):
        sizes = ", ".join(str(len(part)) for part in parts)
        raise InputError(f"{archive} has {sizes} reviews in cv000-699, cv700-799 and cv800-999; each must have some")
    return parts[0], parts[1], parts[2]


def _check(train: Labelled, validation: Labelled, test: Labelled, where: str) -> None:
    labels = {label for _, label in train}
    if len(labels) < 2:
        raise InputError(f"{where}: all rows have the label {min(labels)!r}; a classifier needs two or more")
    for part, rows in (("validation", validation), ("test", test)):
        if not rows:
            raise InputError(
                f"{where}: too few rows of each label to hold some out for {part}; give more, or its files"
            )
        unknown = sorted({label for _, label in rows} - labels)
        if unknown:
            raise InputError(f"{part} has the label {unknown[0]!r}, which no row to learn from has ({where})")
