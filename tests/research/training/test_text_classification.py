"""The task `text`: what is read of a text, which rows are held out, what a trained model knows of its labels."""

import os
import zipfile
from pathlib import Path

import pytest
import torch

from subquad.core.errors import InputError
from subquad.research.training.models import EncoderClassifier
from subquad.research.training.run import train
from subquad.research.training.settings import settings_of
from subquad.research.training.tasks.classification import bag_of_words, majority, padded
from subquad.research.training.tasks.text_classification import Text, cut_to

REAL = os.environ.get("SUBQUAD_DATA")
SMALL = {"model": {"layers": 1, "heads": 2, "width": 16, "feed_forward": 16}}


def table(path, rows):
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return str(path)


@pytest.fixture
def mine(tmp_path):
    rows = [(f"{word} number {i}", label) for i in range(20) for word, label in (("yes", "good"), ("no", "bad"))]
    return table(tmp_path / "mine.csv", rows)


def test_bytes_are_read_up_to_the_length(mine):
    splits = Text(files=(mine,), length=5).splits()
    for text, item in zip(splits.train.texts, map(splits.train.__getitem__, range(32)), strict=True):
        assert bytes((item["input_ids"] - 2).tolist()).decode() == text[:5]
        assert item["labels"] == int(text.startswith("yes"))  # "bad", "good"
    assert max(len(splits.test[i]["input_ids"]) for i in range(len(splits.test))) == 5


def test_a_letter_cut_in_two_is_left_out():
    assert cut_to("aé", 2) == "a"
    assert cut_to("aé", 3) == "aé"
    assert Text(length=2).encode(["aé"])["input_ids"].tolist() == [[2 + 97, 2 + 0xC3]]


def test_a_single_text_is_not_taken_for_its_letters():
    with pytest.raises(TypeError, match=r"write encode\(\[text\]\)"):
        Text().encode("abc")


def test_batches_are_padded_and_masked_only_where_they_must_be(mine):
    batch = Text(files=(mine,)).encode(["abc", "d"])
    assert batch["input_ids"][1].tolist() == [2 + ord("d"), 0, 0]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert "attention_mask" not in Text(files=(mine,)).encode(["abc", "def"])


def test_the_class_token_comes_first_and_is_what_is_classified(mine):
    task = Text(files=(mine,), pooling="class-token", length=4)
    assert task.encode(["abcdefg"])["input_ids"].tolist() == [[1, *(2 + ord(c) for c in "abcd")]]
    model = task.model(settings_of("text", SMALL).model)
    assert model.config.pooling == "first"
    assert model.config.max_position_embeddings == 5


def test_no_row_is_in_two_splits(mine):
    splits = Text(files=(mine,)).splits()
    parts = [set(split.texts) for split in (splits.train, splits.validation, splits.test)]
    assert [len(part) for part in parts] == [32, 4, 4]
    assert len(set.union(*parts)) == 40


def test_splits_that_are_given_are_taken_as_they_are(tmp_path, mine):
    other = table(tmp_path / "other.csv", [("maybe", "bad"), ("sure", "good")])
    splits = Text(files=(mine,), test_files=(other,)).splits()
    assert splits.test.texts == ["maybe", "sure"]
    assert (len(splits.train), len(splits.validation)) == (36, 4)
    splits = Text(files=(mine,), validation_files=(other,), test_files=(other,)).splits()
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (40, 2, 2)


@pytest.mark.parametrize(("rows", "message"), [
    ([("a", "x"), ("b", "x")], "all rows have the label 'x'"),
    ([("a", "x"), ("b", "y")], "too few rows of each label to hold some out for validation"),
])  # fmt: skip
def test_tables_that_cannot_be_learned_from(tmp_path, rows, message):
    with pytest.raises(InputError, match=message):
        Text(files=(table(tmp_path / "few.csv", rows),)).splits()


def test_a_label_that_cannot_be_learned(tmp_path, mine):
    other = table(tmp_path / "other.csv", [("a", "good"), ("b", "fine")])
    with pytest.raises(InputError, match="test has the label 'fine', which no row to learn from has"):
        Text(files=(mine,), test_files=(other,)).splits()


@pytest.mark.parametrize(("given", "message"), [
    ({"length": 0}, "length=0"),
    ({"held_out": 0.5}, r"held_out=0\.5"),
    ({"test_files": ("a.csv",)}, "go with files"),
    ({"pooling": "max"}, "pooling"),
])  # fmt: skip
def test_settings_that_do_not_fit(given, message):
    with pytest.raises(InputError, match=message):
        settings_of("text", {"task": given})


def test_reviews_are_split_by_their_numbers(tmp_path):
    with zipfile.ZipFile(tmp_path / "movie_reviews.zip", "w") as archive:
        for label in ("pos", "neg"):
            for number in (0, 699, 700, 799, 800, 999):
                archive.writestr(f"{label}/cv{number:03d}_1.txt", f"{label} {number}")
    splits = Text().splits(tmp_path)
    assert splits.train.texts == ["neg 0", "neg 699", "pos 0", "pos 699"]
    assert splits.validation.texts == ["neg 700", "neg 799", "pos 700", "pos 799"]
    assert splits.test.texts == ["neg 800", "neg 999", "pos 800", "pos 999"]
    assert splits.test.labels == [0, 0, 1, 1]
    with pytest.raises(InputError, match=r"the task 'text' needs its data: --data-dir .*task.files=mine.csv"):
        Text().splits(None)


def test_baselines_know_words_and_the_most_frequent_label(mine):
    task = Text(files=(mine,))
    found = task.baselines(task.splits())
    assert found == {"majority class": {"accuracy": 0.5}, "bag of words": {"accuracy": 1.0}}
    task = Text(files=(mine,), length=1)
    cut = task.baselines(task.splits())
    assert cut["bag of words"] == {"accuracy": 1.0}  # "y" and "n"
    assert "bag of words, whole texts" in cut


def test_baselines_by_hand():
    assert majority([1, 1, 0], [0, 0, 1]) == {"accuracy": pytest.approx(1 / 3)}
    assert bag_of_words(["a b", "c"] * 4, [0, 1] * 4, ["b a", "c c", "a"], [0, 1, 1]) == {
        "accuracy": pytest.approx(2 / 3)
    }
    assert padded([torch.arange(2).numpy()], "pair_ids", "pair_mask")["pair_ids"].tolist() == [[0, 1]]


def test_a_trained_model_comes_back_with_its_labels(tmp_path, mine):
    training = {"training": {"steps": 30, "batch": 8, "learning_rate": 1e-2, "warmup": 0, "every": 0}}
    settings = settings_of("text", SMALL | training, {"task": {"files": [mine]}, "model": {"method": "local:window=4"}})
    outcome = train(settings, tmp_path / "run")
    assert outcome.test["accuracy"] == 1.0
    outcome.model.save_pretrained(tmp_path / "model")
    model = EncoderClassifier.from_pretrained(tmp_path / "model").eval()
    said = model(**settings.task.encode(["yes number 77", "no number 78"])).logits.argmax(-1)
    assert [model.config.id2label[i] for i in said.tolist()] == ["good", "bad"]


@pytest.mark.data
def test_words_of_real_reviews_say_most():
    task = Text(length=4000)
    splits = task.splits(Path(REAL))
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [1400, 200, 400]
    found = task.baselines(splits)
    assert found["majority class"] == {"accuracy": 0.5}
    assert found["bag of words"]["accuracy"] > 0.8
