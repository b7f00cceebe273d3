"""Masked copy is the paper's: 0w0w, masked in different places of both halves, and nothing to guess from."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from subquad.research.papers.tasks.masked_copy import MaskedCopy
from subquad.research.training.models import MaskedSymbolEncoder
from subquad.research.training.settings import ModelSettings

TASK = MaskedCopy(length=31)


def items(task=TASK, count=40, split="train"):
    examples = getattr(task.splits(), split)
    return [examples[i] for i in range(count)]


def whole(item):
    """The input with what is masked put back."""
    return np.where(item["labels"] == -100, item["input_ids"], item["labels"])


def test_an_item_is_a_separator_and_a_word_twice():
    for item in items():
        seen = whole(item)
        assert len(seen) == 64
        assert seen[0] == seen[32] == TASK.separator
        assert (seen[:32] == seen[32:]).all()
        assert ((seen[1:32] >= 1) & (seen[1:32] <= TASK.symbols)).all()


def test_a_fifth_of_each_half_is_masked_in_different_places():
    for item in items():
        masked = item["labels"] != -100
        assert ((item["input_ids"] == TASK.mask) == masked).all()
        assert not masked[[0, 32]].any()
        first, second = masked[:32], masked[32:]
        assert first.sum() == second.sum() == round(0.2 * 31)
        assert not (first & second).any()  # so that what is masked can be read in the other half


def test_symbols_and_places_are_drawn_evenly():
    many = items(count=400)
    words = np.concatenate([whole(item)[1:32] for item in many])
    shares = np.bincount(words, minlength=11)[1:] / len(words)
    assert abs(shares - 0.1).max() < 0.02
    places = np.mean([item["labels"] != -100 for item in many], axis=0)
    assert abs(places[1:32] - 6 / 31).max() < 0.1


@pytest.mark.parametrize("masked", [0.01, 0.5])
def test_other_shares(masked):
    item = items(MaskedCopy(length=10, masked=masked), 1)[0]
    assert (item["labels"] != -100).sum() == 2 * max(1, round(masked * 10))


def test_items_depend_on_seed_split_and_number_alone():
    again = items()
    assert all((a["input_ids"] == b["input_ids"]).all() for a, b in zip(items(), again, strict=True))
    others = [items(replace(TASK, seed=1)), items(split="validation"), items(split="test"), items(count=80)[40:]]
    for other in others:
        assert not any((whole(a) == whole(b)).all() for a, b in zip(items(), other, strict=True))


def test_sizes_of_the_splits():
    splits = MaskedCopy(length=7, examples=99).splits()
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [99, 512, 512]


def test_figures_count_masked_places():
    batch = TASK.collate(items(count=3))
    assert batch["input_ids"].shape == (3, 64)
    logits = torch.nn.functional.one_hot(batch["labels"].clamp(min=0), 13).float()
    places = (batch["labels"] != -100).nonzero()
    row, column = places[0]
    logits[row, column] = torch.nn.functional.one_hot(
        (batch["labels"][row, column] + 1) % 13, 13
    ).float()  # one is wrong
    scores = TASK.score(SimpleNamespace(logits=logits), batch)
    assert scores.tolist() == [[11.0, 12.0], [12.0, 12.0], [12.0, 12.0]]
    assert TASK.metrics(scores) == {"accuracy": 35 / 36}
    assert TASK.baselines(TASK.splits()) == {"guess": {"accuracy": 0.1}}


def test_the_model_says_a_symbol_for_each_place():
    model = TASK.model(ModelSettings(layers=1, heads=2, width=16, positions="learned"))
    assert isinstance(model, MaskedSymbolEncoder)
    out = model(**TASK.collate(items(count=2)))
    assert out.logits.shape == (2, 64, TASK.mask + 1)
    assert out.loss > 1.0


@pytest.mark.parametrize(("options", "message"), [
    ({"length": 1}, "length=1"), ({"symbols": 1}, "symbols=1"),
    ({"masked": 0.0}, "masked=0.0"), ({"masked": 0.6}, "masked=0.6"),
])  # fmt: skip
def test_what_is_no_task(options, message):
    with pytest.raises(ValueError, match=message):
        MaskedCopy(**options)
