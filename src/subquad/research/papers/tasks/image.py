"""Images, pixel by pixel: what is shown? Fashion-MNIST in place of LRA's CIFAR10."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8
from torch.utils.data import Dataset

from subquad.core.errors import InputError
from subquad.research.papers.data.idx import read_idx
from subquad.research.training.folders import find_data
from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.models.encoder import EncoderClassifier
from subquad.research.training.tasks.classification import Classification, logistic, majority
from subquad.research.training.tasks.task import Item, Metrics, Splits

LEVELS = 256
LABELS = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


@dataclass(frozen=True, kw_only=True)
class Image(Classification):
    """Predict which of ten things an image shows; its 784 grey levels, row by row, are the tokens.

    The first images of the file are for training, the next ones for validation and the others for the test.

    Attributes:
        train: number of training images.
        validation: number of validation images; the test has all others.
    """

    name: ClassVar[str] = "image"
    summary: ClassVar[str] = "grey levels of an image, pixel by pixel; accuracy of its class"
    needs: ClassVar[str | None] = "fashion_mnist"
    start: ClassVar = {
        "model": {"layers": 4, "heads": 4, "width": 128, "feed_forward": 256, "positions": "learned"},
        "training": {"steps": 2000, "batch": 16, "warmup": 200, "schedule": "cosine", "every": 200},
    }

    train: int = 2000
    validation: int = 500

    def __post_init__(self) -> None:
        if self.train < 1 or self.validation < 1:
            raise ValueError(f"train={self.train} and validation={self.validation} must be at least 1")

    def splits(self, data: Path | None = None) -> Splits:
        """The images in `fashion_mnist`."""
        images, labels = _read(data)
        ends = (0, self.train, self.train + self.validation, len(images))
        if ends[2] >= len(images):
            raise InputError(
                f"train={self.train} and validation={self.validation} leave none of {len(images)} images to report on"
            )
        return Splits(*(Pixels(self, images[a:b], labels[a:b]) for a, b in pairwise(ends)))

    def model(self, settings: ModelSettings) -> EncoderClassifier:
        """An encoder of grey levels."""
        return self.classifier(settings, LABELS, LEVELS, 28 * 28)

    def baselines(self, splits: Splits, data: Path | None = None) -> dict[str, Metrics]:
        """The baselines are the most frequent class, a logistic regression on pixels and the nearest training image."""
        train, test = splits.train, splits.test
        assert isinstance(train, Pixels)
        assert isinstance(test, Pixels)
        known, asked = (part.images.reshape(len(part), -1) / np.float32(255) for part in (train, test))
        distances = (known**2).sum(1) - 2 * asked @ known.T
        nearest = train.labels[distances.argmin(1)]
        return {
            "majority class": majority(train.labels, test.labels),
            "logistic regression on pixels": logistic(known, train.labels, asked, test.labels, strength=0.1),
            "nearest neighbour": {"accuracy": float(np.mean(nearest == test.labels))},
        }


class Pixels(Dataset[Item]):
    """Images as sequences of grey levels."""

    def __init__(self, task: Image, images: UInt8[np.ndarray, "images 28 28"], labels: UInt8[np.ndarray, " images"]):
        self.task, self.images, self.labels = task, images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Item:
        return {"input_ids": self.task.tokens(self.images[index].ravel()), "labels": int(self.labels[index])}

    def contents_to_compare(self) -> Iterator[bytes]:
        """All images and labels."""
        yield self.images.tobytes()
        yield self.labels.tobytes()


def _read(data: Path | None) -> tuple[UInt8[np.ndarray, "images 28 28"], UInt8[np.ndarray, " images"]]:
    paths = [
        find_data(data, "fashion_mnist", f"{name}-ubyte.gz", "the task 'image'")
        for name in ("images-idx3", "labels-idx1")
    ]
    images, labels = (read_idx(path) for path in paths)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1] or labels.max(initial=0) >= len(LABELS):
        raise InputError(
            f"{paths[0]} has images {images.shape} and {paths[1]} labels {labels.shape} up to {labels.max(initial=0)}: "
            f"images of 28 × 28 are needed, and a label from 0 to {len(LABELS) - 1} for each"
        )
    return images, labels
