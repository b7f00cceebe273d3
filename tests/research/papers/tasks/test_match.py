"""The task `match`: pairs of passages, documents that stay in their split, baselines."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from subquad.core.errors import InputError
from subquad.research.papers.tasks.match import Match, _similar
from subquad.research.training.run import train
from subquad.research.training.settings import settings_of

REAL = os.environ.get("SUBQUAD_DATA")


@pytest.fixture
def data(tmp_path):
    """30 documents, each of two letters of its own and a number for each of its places."""
    with zipfile.ZipFile(tmp_path / "movie_reviews.zip", "w") as archive:
        for i in range(30):
            letters = chr(ord("A") + i // 2) + chr(ord("a") + i % 26)
            archive.writestr(f"pos/cv{i:03d}_0.txt", "".join(f"{letters}{place:03d} " for place in range(20)))
        archive.writestr("pos/cv999_0.txt", "too short")
    return tmp_path


def task(**more):
    return Match(length=24, examples=200, held_out=100, **more)


def places(passage):
    """The letters of a document, and the numbers of its places, that a passage has whole."""
    words = [word for word in passage.decode().split(" ") if len(word) == 5]
    return {word[:2] for word in words}, {int(word[2:]) for word in words}


def test_half_of_the_pairs_are_of_one_document_and_do_not_overlap(data):
    part = task().splits(data).train
    for i in range(len(part)):
        first, second, same = part.pair(i)
        assert len(first) == len(second) == 24
        (own, here), (other, there) = places(first), places(second)
        assert same == i % 2 == (own == other)
        if same:
            assert not here & there


def test_no_document_is_in_two_splits(data):
    splits = task().splits(data)
    parts = [set(part.documents) for part in (splits.train, splits.validation, splits.test)]
    assert len(parts[0]) == 21
    assert len(set.union(*parts)) == 30  # without the one that is too short


def test_passages_begin_alike_in_both_kinds_of_pairs(data):
    part = task(seed=1).splits(data).train
    begins = {0: [], 1: []}
    for i in range(len(part)):
        first, second, same = part.pair(i)
        begins[same] += [min(places(passage)[1]) for passage in (first, second)]
    assert abs(np.mean(begins[0]) - np.mean(begins[1])) < 4 * np.std(begins[0]) * (2 / 200) ** 0.5


def test_a_pair_depends_on_seed_split_and_number(data):
    splits, again = task().splits(data), task().splits(data)
    assert [splits.train.pair(i) for i in range(5)] == [again.train.pair(i) for i in range(5)]
    assert splits.train.pair(0) != task(seed=1).splits(data).train.pair(0)


def test_batches_hold_both_passages(data):
    own = task()
    part = own.splits(data).train
    batch = own.collate([part[0], part[1]])
    assert sorted(batch) == ["input_ids", "labels", "pair_ids"]
    assert batch["labels"].tolist() == [0, 1]
    assert bytes((batch["pair_ids"][1] - 2).tolist()) == part.pair(1)[1]


def test_files_of_the_users_own(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"document {i} " * 10)
    assert len(task(files=(str(tmp_path),)).splits().train.documents) == 14


def test_too_few_documents(data):
    with pytest.raises(
        InputError, match=r"0 documents of 2,000 bytes or more are too few.*smaller task\.length than 1000"
    ):
        Match(length=1000).splits(data)
    with pytest.raises(InputError, match="the task 'match' needs its data"):
        task().splits(None)


def test_baselines_see_that_documents_have_words_of_their_own(data):
    own = task()
    found = own.baselines(own.splits(data))
    assert found["guess"] == {"accuracy": 0.5}
    assert found["similar bytes"]["accuracy"] > 0.8


def test_the_threshold_is_the_best_of_training():
    from sklearn.feature_extraction.text import CountVectorizer

    train = [(b"a b", b"a b", 1), (b"a b", b"a c", 1), (b"a b", b"c d", 0), (b"b b", b"a d", 0)]
    test = [(b"c d", b"c d", 1), (b"c a", b"c b", 1), (b"a b", b"c d", 1), (b"c c", b"b b", 0)]
    bag = CountVectorizer(token_pattern=r"\w+")
    assert _similar(bag, train, test) == {"accuracy": 0.75}
    assert _similar(bag, [(*pair[:2], 1 - pair[2]) for pair in train], test)["accuracy"] in (0.25, 0.75)


def test_a_model_of_pairs_is_trained(data, tmp_path):
    settings = settings_of("match", {
        "task": {"length": 24, "examples": 64, "held_out": 20},
        "model": {"layers": 1, "heads": 2, "width": 16, "feed_forward": 16, "method": "linear"},
        "training": {"steps": 3, "batch": 4, "warmup": 0, "every": 0},
    })  # fmt: skip
    outcome = train(settings, tmp_path / "run", data=data)
    assert outcome.model.config.pairs
    assert outcome.model.config.id2label == {0: "different", 1: "same"}
    assert 0.0 <= outcome.test["accuracy"] <= 1.0


@pytest.mark.data
@pytest.mark.parametrize(("source", "documents"), [("movie_reviews", 1990), ("state_union", 65)])
def test_real_documents(source, documents):
    own = Match(source=source, length=512)
    splits = own.splits(Path(REAL))
    found = sum(len(part.documents) for part in (splits.train, splits.validation, splits.test))
    assert documents - 20 <= found <= documents + 10
    words = own.baselines(splits)["similar words"]["accuracy"]
    assert 0.6 < words < 0.9
