"""The ideas of published systems, and the fast form of clustered-tail, agree with exact attention where they must."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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
    key, value = torch.cat([first, distinct, last], 2)[:, None]
    query = torch.randn(2, 3, n, 8, generator=generator)
    attention = module.Attention()
    attention.factors[0, False] = torch.eye(8).expand(2, 8, 8)

    def by_cells(**settings: object) -> torch.Tensor:
        return attention.by_cells(module.Cells(**settings), 0, query, key, value, SCALE)

    def on(seen: torch.Tensor) -> torch.Tensor:
        seen = seen & torch.ones(n, key.shape[2], dtype=torch.bool).tril(key.shape[2] - n)
        logits = (query @ key[0, :, None].mT * SCALE).masked_fill(~seen, -torch.inf)
        return logits.softmax(-1) @ value[0, :, None]

    between = torch.zeros(key.shape[2], dtype=torch.bool)
    between[module.FIRST : module.FIRST + 64] = True
    return SimpleNamespace(module=module, attention=attention, by_cells=by_cells, on=on, between=between)


def test_steps_by_cells_are_exact_where_all_cells_are_read_or_have_equal_keys(steps):
    exact = steps.on(torch.ones_like(steps.between))
    for settings in ({"exact": 4}, {"exact": 4, "drop": True}, {"exact": 0}, {"exact": 0, "segments": 2}):
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
    assert steps.attention.read[-1] > (near + 4 + 16) / (near + 64)


def test_cells_hold_keys_with_like_logits_and_plain_ones_near_keys(script):
    module = script("step_cells")
    read, other = torch.arange(32) % 2, torch.arange(32) // 16  # of two numbers of a key, queries read the first
    keys, factor = torch.stack([read + 0.0, 9.0 * other], -1)[None, None], torch.diag(torch.tensor([5.0, 0.01]))[None]
    for settings, expected in (({}, read), ({"plain": True}, other)):
        labels, count = module.labels_of(keys, factor, module.Cells(0, **settings))
        assert (count, labels[0, 0].tolist()) == (2, expected.tolist())
    labels, count = module.labels_of(keys, factor, module.Cells(0, segments=2))
    assert (count, labels[0, 0].tolist()) == (2, other.tolist())  # each half has one cell


def test_the_factor_of_cells_is_that_of_the_last_queries_or_of_all(script):
    module, layer = script("step_cells"), SimpleNamespace(layer_idx=0)
    attention, first = module.Attention(), torch.tensor([3.0, 0.0]).expand(1, 4, module.LAST, 2)
    query = torch.cat([first, first.flip(-1)], 2)
    attention(layer, query, query[:, :2], query[:, :2], None, 1.0)
    for all_queries, squares in ((False, [0.0, 9.0]), (True, [4.5, 4.5])):
        factor, expected = attention.factors[0, all_queries], torch.diag(torch.tensor(squares)).expand(2, 2, 2)
        torch.testing.assert_close(factor @ factor.mT, expected, rtol=0, atol=0.01)


def test_the_fidelity_of_steps_is_that_of_a_model_whose_steps_do_not_see_the_keys_between(script):
    module, hf = script("step_cells"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **heads}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, initializer_range=0.4)).eval()
    prompt = module.FIRST + 64 + module.LAST
    tokens = torch.randint(40, (prompt + module.STEPS,))
    dropped, whole = module.Cells(0, drop=True), module.Cells(4)
    results = module.fidelity(SimpleNamespace(model=model), tokens.tolist(), [dropped, whole])
    assert results[whole][:2] == pytest.approx((0.0, 1.0), abs=1e-5)
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    with torch.inference_mode():
        exact = model(tokens[None]).logits[0, prompt:].log_softmax(-1)  # by the attention that it had before
        mask[prompt:, module.FIRST : module.FIRST + 64] = False
        other = model(tokens[None], attention_mask=mask[None, None]).logits[0, prompt:].log_softmax(-1)
    kl, same = (exact.exp() * (exact - other)).sum(-1).mean(), (exact.argmax(-1) == other.argmax(-1)).float().mean()
    assert kl > 1e-3
    share = (4 + module.FIRST + module.LAST) / prompt
    assert results[dropped] == pytest.approx((float(kl), float(same), share), rel=1e-3)


def test_the_times_of_steps_by_cells_are_those_of_as_many_keys_as_the_cells_leave(script, monkeypatch):
    module, keys, outs = script("step_cells_time"), [], {}

    def recorded(query: torch.Tensor, key: torch.Tensor, *args: object, **kwargs: object) -> object:
        keys.append(key.shape[2])
        return attend(query, key, *args, **kwargs)

    def milliseconds(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
        outs.update({name: call() for name, call in calls.items()})
        return {name: [1.0, 2.0, 9.0] for name in calls}

    attend = module.attend_few
    monkeypatch.setattr(module, "attend_few", recorded)
    monkeypatch.setattr(module.sheet, "milliseconds", milliseconds)
    assert module.timed(512, 5, torch.float32, 2, 1.0) == module.StepTimes(exact=2.0, cells=2.0, rest=2.0)
    assert keys == [512, 5 * 16, 256 + 32]
    assert outs["cells"].shape == outs["exact"][0].shape
    assert outs["rest"].shape[:2] == (2, 1)


def test_the_time_of_making_cells_is_that_of_kmeans_in_each_segment(script, monkeypatch):
    module, made = script("step_cells_time"), []

    def recorded(*args: object) -> object:
        made.append(labels_of(*args))
        return made[-1]

    labels_of = module.labels_of
    monkeypatch.setattr(module, "labels_of", recorded)
    assert module.made(64, 2, 0.01) > 0
    assert all(count == 4 and labels.shape == (1, 3, 64) for labels, count in made)
    assert all(int(labels[..., :32].max()) < 2 <= int(labels[..., 32:].min()) for labels, _ in made)


def test_the_page_of_times_has_bounds_of_whole_steps_and_when_the_cells_have_paid(script, monkeypatch, tmp_path):
    module = script("step_cells_time")
    monkeypatch.setattr(module, "timed", lambda *_: module.StepTimes(exact=4.0, cells=2.0, rest=1.0))
    monkeypatch.setattr(module, "made", lambda length, segments, _: 1000.0 / segments)
    module.main(lengths=(8192,), out=tmp_path / "page.md")
    written = (tmp_path / "page.md").read_text("utf-8")
    together, by_head = (1 + 4 * (count * 16 + 256 + 512) / 8192 for count in (64, 108))
    assert (
        f"| 8,192 | bfloat16 | 1 | 4.00 | 2.00 | 1.00 | 1.67× | {5 / together:.2f}× | {5 / by_head:.2f}× |" in written
    )
    whole, parts = (f"{8 * ms / (5 - by_head):,.0f}" for ms in (1000, 62.5))
    assert f"| 8,192 | 1,000 ({whole}) | 62 ({parts}) |" in written


@pytest.mark.parametrize(("length", "extensions"), [(4096, []), (16384, [16384 + 256])])
def test_the_page_of_cells_has_the_means_of_passages(script, monkeypatch, tmp_path, length, extensions):
    module, asked = script("step_cells"), []

    def extended_to(tokens: int) -> SimpleNamespace:
        asked.append(tokens)
        return SimpleNamespace(reaching=lambda _: "extended")

    monkeypatch.setattr(module, "load", lambda _: SimpleNamespace(limit=8192, extended_to=extended_to))
    passages = [SimpleNamespace(tokens=[number]) for number in (1, 2)]
    monkeypatch.setattr(module.decoder_passages, "passages", lambda *_: passages)
    monkeypatch.setattr(module, "fidelity", lambda _, tokens, rows: dict.fromkeys(rows, (0.1 * tokens[0], 0.5, 0.25)))
    module.main(lengths=(length,), passages=2, out=tmp_path / "page.md")
    assert asked == extensions
    written = (tmp_path / "page.md").read_text("utf-8")
    assert "| 64 cells exact, chosen by head | 25.0 % | 0.1500 | 0.1000–0.2000 | 0.500 |" in written
