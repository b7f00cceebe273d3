"""The task `image`: images as sequences, their splits, their baselines."""

import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from subquad.core.errors import InputError
from subquad.research.papers.tasks.image import LABELS, Image
from subquad.research.training.run import train
from subquad.research.training.settings import settings_of

REAL = os.environ.get("SUBQUAD_DATA")


def write(folder, name, array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def data(tmp_path):
    """30 images of two classes: bright above, bright below."""
    labels = np.arange(30, dtype=np.uint8) % 2
    images = np.random.default_rng(0).integers(0, 60, (30, 28, 28)).astype(np.uint8)
    images[labels == 0, :14] += 150
    images[labels == 1, 14:] += 150
    write(tmp_path, "images-idx3", images)
    write(tmp_path, "labels-idx1", labels)
    return tmp_path


def test_pixels_are_tokens_row_by_row(data):
    task = Image(train=16, validation=6)
    splits = task.splits(data)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (16, 6, 8)
    item = splits.validation[1]
    assert item["labels"] == 1
    assert (item["input_ids"] - 2).reshape(28, 28).tolist() == splits.validation.images[1].tolist()
    assert len(task.collate([item, splits.test[0]])) == 2  # nothing is padded: no mask
    with_token = Image(train=16, validation=6, pooling="class-token").splits(data).train[0]["input_ids"]
    assert len(with_token) == 785
    assert with_token[0] == 1


def test_baselines_tell_above_from_below(data):
    task = Image(train=16, validation=6)
    found = task.baselines(task.splits(data))
    assert found == {
        "majority class": {"accuracy": 0.5},
        "logistic regression on pixels": {"accuracy": 1.0},
        "nearest neighbour": {"accuracy": 1.0},
    }


def test_images_that_do_not_fit(data):
    with pytest.raises(InputError, match="leave none of 30 images"):
        Image(train=25, validation=5).splits(data)
    write(data, "labels-idx1", np.zeros(29, dtype=np.uint8))
    with pytest.raises(InputError, match=r"labels \(29,\)"):
        Image().splits(data)
    write(data, "labels-idx1", np.full(30, 10, dtype=np.uint8))
    with pytest.raises(InputError, match="up to 10"):
        Image().splits(data)
    (data / "images-idx3-ubyte.gz").unlink()
    with pytest.raises(InputError, match=r"needs images-idx3-ubyte\.gz"):
        Image().splits(data)


def test_a_model_is_trained(data, tmp_path):
    settings = settings_of("image", {
        "task": {"train": 16, "validation": 6},
        "model": {"layers": 1, "heads": 2, "width": 16, "feed_forward": 16, "method": "local:window=8"},
        "training": {"steps": 3, "batch": 4, "warmup": 0, "every": 0},
    })  # fmt: skip
    outcome = train(settings, tmp_path / "run", data=data)
    assert list(outcome.model.config.id2label.values()) == list(LABELS)
    assert outcome.test["accuracy"] in [i / 8 for i in range(9)]


@pytest.mark.data
def test_the_real_images_are_split():
    splits = Image().splits(Path(REAL))
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [2000, 500, 503]
