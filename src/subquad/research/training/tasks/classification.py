"""Common parts of tasks of one class a sequence: tokens, batches, accuracy, and baselines that know no attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.models.encoder import EncoderClassifier, EncoderConfig
from subquad.research.training.tasks.task import Batch, Item, Metrics, Task

PADDING, CLASS_TOKEN = 0, 1
FIRST = 2  # the first token of a task's own; bytes are 2 to 257


@dataclass(frozen=True, kw_only=True)
class OneClass(Task):
    """Sequences of tokens with a class each: batches, scores and accuracy."""

    metric: ClassVar[str] = "accuracy"
    greater_is_better: ClassVar[bool] = True

    @property
    def padding(self) -> int:
        """The token that fills a batch up."""
        return PADDING

    def collate(self, items: Sequence[Item]) -> Batch:
        """Items as one batch, padded to its longest; without a mask where nothing is padded."""
        batch = padded([item["input_ids"] for item in items], padding=self.padding)
        return batch | {"labels": torch.tensor([item["labels"] for item in items])}

    def score(self, outputs: Any, batch: Batch) -> Tensor:
        """1 where the class is right, else 0."""
        return (outputs.logits.argmax(-1) == batch["labels"])[:, None].float()

    def metrics(self, scores: Tensor) -> Metrics:
        """The share of items whose class is right."""
        return {"accuracy": float(scores[:, 0].double().mean())}


@dataclass(frozen=True, kw_only=True)
class Classification(OneClass):
    """Sequences with a class each; an encoder reads all tokens, and what it pools of them is classified.

    Attributes:
        pooling: what is classified: the "mean" of the tokens, or a "class-token" that is put before them.
    """

    pooling: Literal["mean", "class-token"] = "mean"

    def classifier(
        self, settings: ModelSettings, labels: Sequence[str], symbols: int, longest: int, *, pairs: bool = False
    ) -> EncoderClassifier:
        """A new encoder of `symbols` kinds of tokens and at most `longest` of them; its config names the labels."""
        config = settings.config(
            EncoderConfig,
            longest=longest + (self.pooling == "class-token"),
            vocab_size=FIRST + symbols,
            pad_token_id=PADDING,
            pooling="first" if self.pooling == "class-token" else "mean",
            pairs=pairs,
            id2label=dict(enumerate(labels)),
            label2id={label: i for i, label in enumerate(labels)},
        )
        return EncoderClassifier(config)

    def tokens(self, symbols: ArrayLike) -> NDArray[np.int64]:
        """Symbols 0, 1, … as tokens, with the class token before them where there is one."""
        ids = FIRST + np.asarray(symbols, dtype=np.int64)
        return np.concatenate([[CLASS_TOKEN], ids]) if self.pooling == "class-token" else ids


def padded(
    sequences: Sequence[NDArray[np.int64]],
    ids: str = "input_ids",
    mask: str = "attention_mask",
    padding: int = PADDING,
) -> Batch:
    """Sequences of tokens as rows of one tensor, by these names; the mask is left out where nothing is padded."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    rows = pad_sequence([torch.from_numpy(sequence) for sequence in sequences], batch_first=True, padding_value=padding)
    valid = torch.arange(rows.shape[1]) < lengths[:, None]
    return {ids: rows} if bool(valid.all()) else {ids: rows, mask: valid.long()}


def majority(train: ArrayLike, test: ArrayLike) -> Metrics:
    """The accuracy of always saying the class that is most frequent in training."""
    classes, counts = np.unique(np.asarray(train), return_counts=True)
    return {"accuracy": float(np.mean(np.asarray(test) == classes[counts.argmax()]))}


def logistic(train: Any, labels: ArrayLike, test: Any, truth: ArrayLike, strength: float = 1.0) -> Metrics:
    """The accuracy of logistic regression on features; `strength` is the inverse of its regularisation."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, max_iter=1000).fit(train, np.asarray(labels))
    return {"accuracy": float(model.score(test, np.asarray(truth)))}


def bag_of_words(train: Sequence[str], labels: ArrayLike, test: Sequence[str], truth: ArrayLike) -> Metrics:
    """The accuracy of logistic regression on the words of texts (tf-idf), whatever their order."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+|[^\w\s]")
    return logistic(words.fit_transform(train), labels, words.transform(test), truth, strength=10.0)
