"""Labelled tasks: their data is read, their scores are right, their faults are named."""

import os
import zipfile
from pathlib import Path

import pytest
import torch

from subquad.core.errors import InputError
from subquad.tools.compare.labelled_tasks import TASKS, Probe, load_task, share_right

REAL = os.environ.get("SUBQUAD_DATA")


def test_banking77_probes_the_embeddings(tmp_path):
    (tmp_path / "train.csv").write_text("text,category\n" + "a,x\nb,y\n" * 10)
    (tmp_path / "test.csv").write_text("text,category\na,x\nb,y\nb,x\n")
    task = load_task("banking77", tmp_path)
    vectors = torch.tensor([[1.0, 0.0] if text == "a" else [0.0, 1.0] for text in task.texts])
    assert task.score(vectors) == {"accuracy": pytest.approx(2 / 3)}


def test_movie_reviews_split_by_number(tmp_path):
    with zipfile.ZipFile(tmp_path / "movie_reviews.zip", "w") as archive:
        for label in ("pos", "neg"):
            for number in (0, 1, 799, 800, 999):
                archive.writestr(f"movie_reviews/{label}/cv{number:03d}_1.txt", f"{label} {number}")
        archive.writestr("movie_reviews/README", "not a review")
    task = load_task("movie-reviews", tmp_path)
    assert len(task.texts) == 10
    assert {text.split()[1] for text in task.texts[6:]} == {"800", "999"}
    vectors = torch.tensor([[1.0, 0.0] if "pos" in text else [0.0, 1.0] for text in task.texts])
    assert task.score(vectors) == {"accuracy": 1.0}


def test_sts_ranks_cosines(tmp_path):
    (tmp_path / "sts.tsv").write_text("a\ta\t5.0\na\tb\t1.0\na\tc\t3\n")
    task = load_task("sts", tmp_path)
    angle = {"a": 0.0, "b": 1.5, "c": 0.5}
    vectors = torch.tensor([[torch.tensor(angle[t]).cos(), torch.tensor(angle[t]).sin()] for t in task.texts])
    assert task.score(vectors)["spearman"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["retrieval.jsonl", "retrieval.csv"])
def test_retrieval_finds_each_questions_passage(tmp_path, name):
    rows = {
        "retrieval.jsonl": '{"question": "q1", "passage": "p1"}\n{"question": "q2", "passage": "p2"}\n'
        '{"question": "q3", "passage": "p1"}\n',
        "retrieval.csv": "question,passage\nq1,p1\nq2,p2\nq3,p1\n",
    }[name]
    (tmp_path / name).write_text(rows)
    task = load_task("retrieval", tmp_path / name)
    assert task.texts == ["p1", "p2", "q1", "q2", "q3"]
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.1], [0.2, 0.8], [0.1, 0.9]])
    assert task.score(vectors) == {"recall@1": pytest.approx(2 / 3)}


@pytest.mark.parametrize(("examples", "kept"), [(None, 40), (99, 40), (20, 20), (8, 8)])
def test_examples_keeps_that_share_of_both_parts(tmp_path, examples, kept):
    for part, rows in (("train", 30), ("test", 10)):
        (tmp_path / f"{part}.csv").write_text("text,category\n" + "".join(f"{part} {i},{i % 2}\n" for i in range(rows)))
    texts = load_task("banking77", tmp_path, examples).texts
    assert len(texts) == kept
    assert sum(text.startswith("test") for text in texts) == max(1, kept // 4)
    assert texts == load_task("banking77", tmp_path, examples).texts


def test_examples_of_pairs_are_whole_rows(tmp_path):
    (tmp_path / "sts.tsv").write_text("".join(f"a{i}\tb{i}\t{i}\n" for i in range(10)))
    texts = load_task("sts", tmp_path, 4).texts
    assert [text[0] for text in texts] == ["a", "b"] * 4
    assert [text[1:] for text in texts[::2]] == [text[1:] for text in texts[1::2]]


@pytest.mark.parametrize(("task", "file", "content", "message"), [
    ("banking77", "train.csv", "text,label\na,b\n", "needs the columns"),
    ("movie-reviews", "movie_reviews.zip", "no zip", "not a zip archive"),
    ("sts", "sts.tsv", "a\tb\n", "sentence, sentence, score"),
    ("retrieval", "retrieval.jsonl", '{"question": "q"}\n', "needs the columns 'question' and 'passage'"),
])  # fmt: skip
def test_malformed_data_is_named(tmp_path, task, file, content, message):
    (tmp_path / file).write_text(content)
    with pytest.raises(InputError, match=message):
        load_task(task, tmp_path)


@pytest.mark.data
@pytest.mark.parametrize(("name", "texts"), [("banking77", 13_083), ("movie-reviews", 2_000)])
def test_the_real_data_is_whole(name, texts):
    assert len(load_task(name, Path(REAL)).texts) == texts


def test_tasks_are_named_for_the_command():
    assert list(TASKS) == ["banking77", "movie-reviews", "sts", "retrieval", "labelled"]


def test_tables_of_ones_own_and_the_probe_of_their_labels(tmp_path):
    (tmp_path / "labelled").mkdir()
    for part, rows in (("train", "a,x\nb,y\n" * 5), ("test", "a,x\nb,x\n")):
        (tmp_path / "labelled" / f"{part}.csv").write_text("text,label\n" + rows)
    task = load_task("labelled", tmp_path)
    assert (task.train, task.labels[task.train :]) == (10, ["x", "x"])
    vectors = torch.tensor([[1.0, 0.0] if text == "a" else [0.0, 1.0] for text in task.texts])
    predicted = Probe(vectors[: task.train], task.labels[: task.train]).predict(3 * vectors[task.train :])
    assert predicted == ["x", "y"]  # vectors are brought to length 1
    assert share_right(predicted, task.labels[task.train :]) == 0.5
    assert task.score(vectors) == {"accuracy": 0.5}
