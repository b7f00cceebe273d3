"""The oracles and variants of the benchmarks of decoders do what they are named after."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import subquad as sq
from subquad.methods.clustered_tail import OF_RECTANGLE, by_length
from subquad.tools.models.next_tokens import NextTokens

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
N = 300


@pytest.fixture
def oracles(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)  # as for a script
    return importlib.import_module("decoder_oracles")


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("decoder_rules")


@pytest.fixture
def passages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("decoder_passages")


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, N, 64, generator=generator) for heads in (4, 2, 2))


def run(method, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return method(*inputs, is_causal=True, enable_gqa=True)


def masked(inputs: tuple[Tensor, Tensor, Tensor], allowed: Tensor) -> Tensor:
    """Exact attention of the pairs that are allowed, (4, N, N)."""
    return torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=allowed, enable_gqa=True)


def logits_of(inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The logits (4, N, N), −∞ for later keys."""
    query, key, _ = inputs
    logits = (query[0] @ key[0].repeat_interleave(2, 0).mT) / 8
    return logits.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), -torch.inf)


def test_an_oracle_that_may_choose_all_keys_is_exact(oracles, inputs):
    exact = run(sq.Full(), inputs)
    for oracle in (oracles.WindowAndBest(window=7, best=N), oracles.WindowAndBlocks(window=7, best=N)):
        torch.testing.assert_close(run(oracle, inputs), exact)


def test_the_best_keys_of_an_oracle_lie_before_its_window(oracles, inputs):
    row, key = torch.arange(N)[:, None], torch.arange(N)
    near, before = (key > row - 9) & (key <= row), key <= row - 9
    logits = logits_of(inputs).masked_fill(~before, -torch.inf)
    fifth = logits.sort(-1, descending=True).values[..., 4:5]
    expected = masked(inputs, near | (before & (logits >= fifth)))
    torch.testing.assert_close(run(oracles.WindowAndBest(window=9, best=5), inputs), expected)
    torch.testing.assert_close(run(oracles.WindowAndFirst(window=9), inputs), masked(inputs, near | (key == 0)))


def test_the_best_blocks_of_an_oracle_have_most_weight_of_their_queries(oracles, inputs):
    row, key = torch.arange(N)[:, None], torch.arange(N)
    near = (key > row - 9) & (key <= row)
    weights = logits_of(inputs).softmax(-1).masked_fill(near, 0.0)
    allowed = near.expand(4, N, N).clone()
    for start in range(0, N, 64):
        rows = slice(start, start + 64)
        mass = torch.stack([weights[:, rows, at : at + 64].sum((1, 2)) for at in range(0, N, 64)], -1)
        for head, blocks in enumerate(mass.topk(2).indices.tolist()):
            for at in blocks:
                allowed[head, rows, at * 64 : at * 64 + 64] = True
    expected = masked(inputs, allowed & torch.ones(N, N, dtype=torch.bool).tril())
    torch.testing.assert_close(run(oracles.WindowAndBlocks(window=9, best=2), inputs), expected)


def test_the_oracle_of_equal_keys_has_the_top_keys_of_all_rectangles_of_a_query(oracles):
    assert [oracles.top_keys_of(block) for block in range(4)] == [0, 182, 305, 182 + 305]


@pytest.mark.parametrize("queries", ["block", "rectangle"])
def test_the_rule_without_changes_is_the_default(rules, inputs, queries):
    sizes = {"block": 32, "last": 5, "queries": queries}
    default = run(sq.ClusteredTail(**sizes), inputs)
    assert torch.equal(run(rules.TailByRule(**sizes), inputs), default)
    assert torch.equal(run(rules.TailOfVariant(**sizes), inputs), default)
    plain, exact = rules.TailOfVariant(**sizes), run(sq.Full(), inputs)
    for change in (
        {"cells_space": "content"},
        {"cells_without": 4},
        {"clusters_without": 4},
        {"keys_by": "distance"},
        {"keys_by": "weight"},
    ):
        out = run(replace(plain, **change), inputs)
        assert not torch.equal(out, default), change
        assert (out - exact).norm() < 2 * (default - exact).norm(), change


def test_the_sizes_of_the_rule_are_those_of_the_library(rules):
    for queries, keys in ((1024, 1024), (1024, 2048), (700, 3000), (2048, 2048)):
        rule, default = rules.TailByRule().in_rectangle(queries, keys), sq.ClusteredTail()
        clusters, _ = by_length(default.clusters, OF_RECTANGLE.clusters, queries, None)
        topk, _ = by_length(default.topk, OF_RECTANGLE.topk, keys, None)
        assert (rule.clusters, rule.topk, rule.cells) == (clusters, topk, default.cells)


def test_top_keys_by_weight_and_by_the_distance_to_their_cell(rules):
    """The key with most weight is alone in its cell, which misplaces nothing of it."""
    query = torch.zeros(1, 1, 3, 64)
    query[..., 0] = 8.0
    key = torch.zeros(1, 1, 4, 64)
    key[0, 0, :, 0] = torch.tensor([3.0, 2.0, 1.0, -4.0])
    inputs = query, key, torch.zeros(1, 1, 3, dtype=torch.long), torch.tensor([[[0, 1, 1, 1]]])
    assert rules.top_keys_by("weight", *inputs, 1, 2, 2, 1 / 8).tolist() == [[[[0, 1]]]]
    assert rules.top_keys_by("distance", *inputs, 1, 2, 2, 1 / 8).tolist() == [[[[1, 2]]]]


def test_sizes_and_multiply_adds_of_a_rule(rules):
    rule = rules.TailByRule(cluster_factor=1.0, topk_factor=2.0, cells_factor=0.5, block=1024, last=0)
    inside = rule.in_rectangle(1024, 4096)
    assert (inside.clusters, inside.topk, inside.cells) == (32, 128, 32)
    one = 32 * 1024 * 64 * 3 + 2 * 1024 * 32 * 64 + 1024 * (64 + 16) * 128
    assert rule.products(2048) == one + 2 * 1024 * 1024 / 2 * 128
    assert replace(rule, last=10).products(2048) - rule.products(2048) == 10 * 2048 * 128


def test_multiply_adds_of_blocks_are_those_of_their_own_rectangles(rules):
    """At 4,096 tokens, two rectangles of 1,024 × 1,024, and one of 2,048 × 2,048 or two of 1,024 × 2,048."""
    together = rules.TailByRule(cluster_factor=1.0, topk_factor=2.0, cells_factor=0.5, last=0)
    rule = replace(together, queries="block")
    assert rule.products(2048) == together.products(2048)
    small = 32 * 2048 * 64 * 3 + 2 * 1024 * 32 * 64 + 1024 * (91 + 23) * 128
    large = 46 * 2048 * 64 * 3 + 2 * 2048 * 46 * 64 + 2048 * (91 + 23) * 128
    assert rule.products(4096) - together.products(4096) == 2 * small - large


def test_keys_that_are_turned_back_do_not_depend_on_their_position(rules):
    half = 32
    content = torch.randn(2 * half, dtype=torch.float64)
    angles = torch.arange(50)[:, None] * rules.ROPE_BASE ** (-torch.arange(half).double() / half)
    rotated = torch.cat([-content[half:], content[:half]])
    key = content * angles.cos().repeat(1, 2) + rotated * angles.sin().repeat(1, 2)
    torch.testing.assert_close(rules.turned_back(key[None, None])[0, 0], content.expand(50, -1), atol=1e-4, rtol=0)
    # In a rectangle that begins later, all keys share one turn.
    later = rules.turned_back(key[None, None, 20:])[0, 0]
    torch.testing.assert_close(later, later[:1].expand(30, -1), atol=1e-4, rtol=0)
    assert rules.without(torch.arange(8.0), 1).tolist() == [1, 2, 3, 5, 6, 7]


def test_tables_show_means_over_passages(passages):
    one, other = NextTokens(2.0, 4.0, 0.5, 1.0, 1.0, 0.25, 1.0), NextTokens(2.0, 0.0, 0.1, 2.0, 1.0, 0.05, 1.0)
    assert passages.next_token_texts([one, other]) == ["2.72", "0.15000", "0.15000", "0.7500"]
    assert passages.error_texts([[0.1, 0.2], [0.3, 0.2]]) == ["0.2000", "0.2000", "0.2000"]
