"""The task `listops`: its examples, its figures by operator and depth, what its baselines know."""

import pytest
import torch

from subquad.core.errors import InputError
from subquad.research.papers.data.listops_expressions import evaluate, parse
from subquad.research.papers.tasks.listops import TO_BEAT, ListOps, solves
from subquad.research.training.models.encoder import Prediction
from subquad.research.training.run import train
from subquad.research.training.settings import settings_of

SHORT = {"shortest": 4, "longest": 12, "depth": 3, "held_out": 50, "examples": 200}


def test_an_item_is_its_expression_and_its_value():
    part = ListOps(**SHORT).splits().train
    item = part[3]
    assert [token - 2 for token in item["input_ids"].tolist()] == part.expression(3)
    assert item["labels"] == evaluate(part.expression(3))
    assert part[3]["input_ids"].tolist() == item["input_ids"].tolist()


def test_splits_differ_in_their_examples_and_not_between_processes():
    first, again = ListOps(**SHORT).splits(), ListOps(**SHORT).splits()
    assert (len(first.train), len(first.validation), len(first.test)) == (200, 50, 50)
    assert [first.test.expression(i) for i in range(20)] == [again.test.expression(i) for i in range(20)]
    assert [first.test.expression(i) for i in range(20)] != [first.validation.expression(i) for i in range(20)]
    other = ListOps(**SHORT, seed=1).splits()
    assert [first.test.expression(i) for i in range(20)] != [other.test.expression(i) for i in range(20)]


def test_figures_by_operator_and_depth():
    task = ListOps(**SHORT)
    texts = ["[MAX 4 [MIN 2 3 ] ]", "[MAX 1 2 ]", "[SM 1 2 ]"]
    items = [{"input_ids": task.tokens(parse(text)), "labels": evaluate(parse(text))} for text in texts]
    batch = task.collate(items)
    assert batch["attention_mask"].sum(1).tolist() == [7, 4, 4]
    logits = torch.nn.functional.one_hot(torch.tensor([4, 2, 9]), 10).float()
    scores = task.score(Prediction(logits=logits), batch)
    assert task.metrics(scores) == {
        "accuracy": pytest.approx(2 / 3),
        "accuracy_MAX": 1.0,
        "accuracy_SM": 0.0,
        "accuracy_depth_2": 0.5,
        "accuracy_depth_3": 1.0,
    }


def test_the_class_token_is_no_symbol():
    task = ListOps(**SHORT, pooling="class-token")
    batch = task.collate([{"input_ids": task.tokens(parse("[MIN 4 3 ]")), "labels": 3}])
    assert batch["input_ids"][0, 0] == 1
    scores = task.score(Prediction(logits=torch.zeros(1, 10)), batch)
    assert scores.tolist() == [[0.0, 0.0, 2.0]]


def test_root_and_its_digits_know_all_of_a_flat_list():
    task = ListOps(shortest=4, longest=12, depth=2, held_out=60, examples=400)
    found = task.baselines(task.splits())
    assert list(found) == ["majority class", "root operator", TO_BEAT]
    assert found[TO_BEAT]["accuracy"] == 1.0
    assert found["majority class"]["accuracy"] < found["root operator"]["accuracy"] < 1.0


@pytest.mark.slow
def test_what_little_is_read_at_lras_lengths_says_half():
    """The accuracies on 1,000 test examples are within three standard errors of 16.6 %, 36.7 % and 48 %."""
    task = ListOps(held_out=1000, examples=1000)
    found = {name: figures["accuracy"] for name, figures in task.baselines(task.splits()).items()}
    assert found["majority class"] == pytest.approx(0.166, abs=0.036)
    assert found["root operator"] == pytest.approx(0.367, abs=0.046)
    assert found[TO_BEAT] == pytest.approx(0.48, abs=0.048)


def test_a_model_must_beat_root_and_its_digits_by_more_than_chance():
    baselines = {TO_BEAT: {"accuracy": 0.5}}
    assert not solves(0.5, baselines, 100)
    assert not solves(0.59, baselines, 100)
    assert solves(0.61, baselines, 100)
    assert solves(0.59, baselines, 10_000)


@pytest.mark.parametrize(("given", "message"), [
    ({"held_out": 0}, "held_out=0"),
    ({"shortest": 2}, "4 tokens or more"),
    ({"operators": -1.0}, r"operators=-1\.0"),
])  # fmt: skip
def test_settings_that_do_not_fit(given, message):
    with pytest.raises(InputError, match=message):
        settings_of("listops", {"task": given})


def test_a_model_learns_the_outermost_operator(tmp_path):
    settings = settings_of("listops", {
        "task": {"shortest": 4, "longest": 5, "depth": 2, "held_out": 50, "examples": 320},
        "model": {"layers": 1, "heads": 2, "width": 32, "feed_forward": 32, "method": "linear"},
        "training": {"steps": 40, "batch": 16, "learning_rate": 1e-2, "warmup": 0, "every": 0},
    })  # fmt: skip
    outcome = train(settings, tmp_path)
    majority = settings.task.baselines(outcome.splits)["majority class"]["accuracy"]
    assert outcome.test["accuracy"] > majority + 0.1
    assert outcome.model.config.id2label[7] == "7"
