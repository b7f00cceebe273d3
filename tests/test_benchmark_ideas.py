"""The ideas of published systems, and the fast form of clustered-tail, agree with exact attention where they must."""

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import subquad as sq
from subquad.masks import Mask
from subquad.tools.measure.capture import LayerInputs

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCALE = 0.3


@pytest.fixture
def ideas(script) -> ModuleType:
    return script("published_ideas")


@pytest.fixture
def head() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(3, 24, 8, generator=generator))


def exact(head: list[torch.Tensor]) -> torch.Tensor:
    query, key, value = head
    return (SCALE * query @ key.T).softmax(1) @ value


def test_every_idea_is_exact_attention_when_all_keys_are_exact(ideas, head):
    for name, idea in ideas.IDEAS.items():
        answer = idea(*head, SCALE, 24)
        torch.testing.assert_close(answer.out, exact(head), rtol=0, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
        assert answer.keys == pytest.approx(24)


def test_groups_of_one_key_are_exact_with_centroids_for_the_rest_and_not_without(ideas, head):
    for route in ("mass", "error"):
        answer = ideas.key_clusters(*head, SCALE, 3, rest="centroids", route=route, clusters=24)
        torch.testing.assert_close(answer.out, exact(head), rtol=0, atol=1e-5)
    assert answer.keys == pytest.approx(3)
    torch.testing.assert_close(ideas.position_blocks(*head, SCALE, 3, block=1).out, exact(head), rtol=0, atol=1e-5)
    dropped = ideas.key_clusters(*head, SCALE, 3, rest="nothing", clusters=24)
    assert (dropped.out - exact(head)).norm() > 0.1 * exact(head).norm()


def test_blocks_meet_as_many_keys_as_asked_for(ideas, head):
    answer = ideas.position_blocks(*head, SCALE, 8, block=4)
    assert answer.keys == pytest.approx(8)
    assert answer.products == pytest.approx(6 * 6 * 8 / 24 + (8 + 4) * 16)  # scores of blocks, then 8 keys and 4 means


def test_the_dense_form_is_clustered_tail(script):
    settings = {"clusters": 7, "topk": 5, "cells": 3}
    q, k, v = torch.randn(3, 1, 2, 60, 8)
    expected = sq.ClusteredTail(**settings)(q, k, v)
    torch.testing.assert_close(script("clustered_tail_settings").Dense(**settings)(q, k, v), expected)


def test_the_sheet_compares_at_equal_keys_and_at_equal_products(script, run_script, monkeypatch, tmp_path):
    made = script("published_ideas")
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    options = {"mask": Mask(), "scale": SCALE, "bias": None, "dropout_p": 0.0}
    read = SimpleNamespace(inputs=lambda layers: [LayerInputs(0, "layer", q, k, v, options)])
    monkeypatch.setattr(script("speeches"), "passages", lambda data, length, count: read)
    words = ["--lengths", "40", "--keys", "4 40", "--threads", str(torch.get_num_threads())]
    run_script(made, *words, "--out", str(tmp_path / "out.md"))
    lines = (tmp_path / "out.md").read_text("utf-8").splitlines()
    tables = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    assert {line[0] for line in tables} >= set(made.IDEAS)
    assert all(line[2].startswith("0.000 (") for line in tables if line[0] in made.IDEAS)  # all keys are exact
    assert {path.suffix for path in tmp_path.iterdir()} == {".md", ".json", ".png"}


def test_ratios_say_where_the_claim_is_not_met(ideas):
    assert ideas.ratio(0.05, 0.1) == "0.50"
    assert ideas.ratio(0.07, 0.1) == "0.70 (not met)"


def test_the_cheapest_setting_that_is_good_enough_and_the_rules(script):
    settings = script("clustered_tail_settings")
    row = {"length": 512, "cells": 16, "error": 0.1, "least": 0.98, "passages": 2}
    rows = [
        row | {"clusters": 32, "topk": 64, "share": 0.5, "cosine": 0.992},
        row | {"clusters": 64, "topk": 64, "share": 0.6, "cosine": 0.996},
        row | {"clusters": 96, "topk": 64, "share": 0.7, "cosine": 0.997},
    ]
    found = {line[1]: line[2:4] for line in settings.cheapest(rows)}
    assert found == {"0.99": ["50.0 %", "32, 64, 16"], "0.995": ["60.0 %", "64, 64, 16"], "0.998": ["–", "–"]}
    assert [line[3] for line in settings.by_rule(rows)] == ["64, 64, 16", "32, 64, 16"]


def recorded_layers(head: list[torch.Tensor], mask: Mask) -> list[LayerInputs]:
    options = {"mask": mask, "scale": SCALE, "bias": None, "dropout_p": 0.0}
    return [LayerInputs(0, "layer", *(x[None, None] for x in head), options)]


def test_nearest_keys_are_the_largest_logits_and_never_later_ones(script, head):
    nearest = script("nearest_keys")
    query, key, value = head
    for causal in (False, True):
        logits = SCALE * query @ key.T
        if causal:
            logits = logits.masked_fill(~torch.ones(24, 24, dtype=torch.bool).tril(), -torch.inf)
        third = logits.sort(1, descending=True).values[:, 2:3]
        expected = logits.masked_fill(logits < third, -torch.inf).softmax(1) @ value
        want = logits.softmax(1) @ value
        inputs = nearest.Inputs("layer", 24, causal, recorded_layers(head, Mask.causal() if causal else Mask()))
        found = nearest.errors(inputs, {"3": sq.OracleTopK(topk=3), "24": sq.OracleTopK(topk=24)})
        assert found["3"] == pytest.approx(float((expected - want).norm() / want.norm()), rel=1e-4)
        assert found["24"] < 1e-6


def test_exact_keys_of_the_default_tail_are_counted(script):
    nearest = script("nearest_keys")
    assert nearest.exact_keys(2048, False) == 128
    first, second = 512.5 * 1024, 512.5 * 1024 + 1024 * 182  # the block itself; √(32·1024), rounded up, before it
    last = sum(2048 - 128 + 1 + at for at in range(128)) - sum(896 + 1 + at + 182 for at in range(128))
    assert nearest.exact_keys(2048, True) == pytest.approx((first + second + last) / 2048)


def test_the_sheet_of_nearest_keys_says_how_many_are_needed(script, run_script, head, monkeypatch, tmp_path):
    nearest = script("nearest_keys")
    for read, mask, causal in (("encoder_inputs", Mask(), False), ("decoder_inputs", Mask.causal(), True)):
        inputs = nearest.Inputs(read.partition("_")[0], 24, causal, recorded_layers(head, mask))
        monkeypatch.setattr(nearest, read, lambda data, length, inputs=inputs: inputs)
    words = ["--lengths", "24", "--prompts", "24", "--keys", "2 24", "--threads", str(torch.get_num_threads())]
    run_script(nearest, *words, "--out", str(tmp_path / "out.md"))
    written = (tmp_path / "out.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in written.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == ["encoder", "decoder"]
    assert all(float(row[1]) > 0.1 and row[2] == "0.000" for row in rows[2:])
    assert "- In the encoder, `clustered-tail` has an error of " in written
    assert re.search(r"24 nearest keys (reach it|are needed for it)\.", written)  # both errors are rounding
    assert nearest.needed({20: 0.5, 40: 0.2}, 0.3) == "of the numbers measured, 40 nearest keys reach it"
    assert nearest.needed({20: 0.5, 40: 0.2}, 0.1) == "more than 40 nearest keys are needed for it"


@pytest.fixture
def steps(script) -> SimpleNamespace:
    """The cells of keys in steps, with three queries after a prompt of which 64 keys lie in cells."""
    module, generator = script("step_cells"), torch.Generator().manual_seed(3)
    n, distinct = 3, torch.randn(2, 2, 4, 8, generator=generator).repeat_interleave(16, 2)  # equal keys in a cell
    first, last = (torch.randn(2, 2, count, 8, generator=generator) for count in (module.FIRST, module.LAST + n))
    key, value = torch.cat([first, distinct, last], 2)
    query = torch.randn(2, 3, n, 8, generator=generator)
    attention = module.Attention()
    attention.covariances[0] = torch.eye(8).expand(2, 8, 8)

    def by_cells(**settings: object) -> torch.Tensor:
        return attention.by_cells(module.Cells(**settings), 0, query, key, value, SCALE)

    def on(seen: torch.Tensor) -> torch.Tensor:
        seen = seen & torch.ones(n, key.shape[1], dtype=torch.bool).tril(key.shape[1] - n)
        logits = (query @ key[:, None].mT * SCALE).masked_fill(~seen, -torch.inf)
        return logits.softmax(-1) @ value[:, None]

    between = torch.zeros(key.shape[1], dtype=torch.bool)
    between[module.FIRST : module.FIRST + 64] = True
    return SimpleNamespace(module=module, attention=attention, by_cells=by_cells, on=on, between=between)


def test_steps_by_cells_are_exact_where_all_cells_are_read_or_have_equal_keys(steps):
    exact = steps.on(torch.ones_like(steps.between))
    for settings in ({"exact": 4}, {"exact": 4, "drop": True}, {"exact": 0}, {"exact": 0, "variance": True}):
        torch.testing.assert_close(steps.by_cells(**settings), exact, rtol=0, atol=1e-5)
    dropped = steps.by_cells(exact=0, drop=True)
    torch.testing.assert_close(dropped, steps.on(~steps.between), rtol=0, atol=1e-5)
    assert (dropped - exact).norm() > 0.01 * exact.norm()


def test_the_share_of_keys_that_steps_read_counts_means_and_first_and_last_tokens(steps):
    near = steps.module.FIRST + steps.module.LAST
    for settings, keys in (({"exact": 0}, 4), ({"exact": 1}, 4 + 16), ({"exact": 4}, 4 + 64)):
        steps.by_cells(**settings)
        assert steps.attention.read[-1] == pytest.approx((near + keys) / (near + 64))
    steps.by_cells(exact=1, by_head=True)
    assert steps.attention.read[-1] >= (near + 4 + 16) / (near + 64)
