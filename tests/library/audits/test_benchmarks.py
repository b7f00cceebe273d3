"""The scripts behind the figures of audits, at small sizes and without real data."""

import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.audits.exact_rows import exact_rows
from subquad.tools.measure.capture import LayerInputs

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)  # as for a script
    return importlib.import_module


def test_coverage_knows_the_errors_that_it_simulates(script):
    table = script("audit").coverage(2, calls=2)
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()
    }
    share, bound, held, square, square_bound, _ = cells["one head of four 0.4, else 0.02"]
    assert (share, square) == ("0.2500", f"{0.25 * 0.16 + 0.75 * 0.0004:.4f}")
    assert float(bound) > 0.2
    assert float(square_bound) > 0.0403
    assert held in ("0.0 %", "50.0 %", "100.0 %")


def test_alarms_come_for_other_errors_and_not_for_the_same(script):
    audit, drawn = script("audit"), torch.Generator().manual_seed(0)

    def calls(size: float) -> list[list[tuple[float, ...]]]:
        return [[tuple((size * torch.rand(32, generator=drawn)).tolist()) for _ in range(140)] for _ in range(2)]

    audit_streams, audit.STREAMS = audit.STREAMS, 3
    try:
        base = calls(0.1)
        assert Counter(audit.alarms(base, base, same=True)) == {None: 3}
        assert all(each is not None and each < 40 for each in audit.alarms(base, calls(0.2), same=False))
    finally:
        audit.STREAMS = audit_streams


@pytest.mark.parametrize("kind", ["normal", "outliers", "alike"])
def test_the_deterministic_bound_is_never_exceeded(script, kind):
    certificate = script("certificate")
    q, k, v = torch.randn(3, 90, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if kind == "outliers":
        q, k, v = certificate.adversarial(90)
    if kind == "alike":
        q, k = q[:1] + 0.01 * q, k[:1] + 0.01 * k
    bound, error, size = certificate.certified(q, k, v, 32**-0.5)
    assert (bound >= error - 1e-9 * size).all()
    assert error.max() > 0
    assert bool((bound < size).all()) == (kind == "alike")


def layer_inputs(N: int, *, causal: bool = False, groups: int = 4, large: float = 1.0) -> LayerInputs:
    drawn = torch.Generator().manual_seed(0)
    q, (k, v) = torch.randn(1, 4, N, 16, generator=drawn), torch.randn(2, 1, groups, N, 16, generator=drawn)
    mask = sq.Mask.causal() if causal else sq.Mask()
    return LayerInputs(0, "layer", large * q, k, v, {"mask": mask, "bias": None, "scale": None})


def sampled_heads(script, layer: LayerInputs, seed: int = 0):
    sampled_rows, drawn = script("sampled_rows"), torch.Generator().manual_seed(seed)
    chosen = sampled_rows.drawn(layer, drawn)
    return sampled_rows, chosen, list(sampled_rows.heads(layer, chosen)), drawn


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
def test_a_sample_of_all_keys_is_the_exact_row(script, causal, groups):
    layer = layer_inputs(90, causal=causal, groups=groups)
    sampled_rows, chosen, rows, drawn = sampled_heads(script, layer)
    exact = exact_rows(*sampled_rows.prepared(layer), chosen).double().view(4, sampled_rows.ROWS, -1)
    for own, true in zip(rows, exact, strict=True):
        found = sampled_rows.estimate(own, sampled_rows.exact_keys(own, 0.05), 1e-9, 0.05, drawn)
        assert found.all_keys.all()
        assert (found.radius == 0).all()
        assert (found.keys == own.visible.sum(-1)).all()
        torch.testing.assert_close(found.out, true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_radius_contains_the_exact_row_as_often_as_it_should(script, causal):
    right, partial = [], []
    sampled_rows, _, rows, drawn = sampled_heads(script, layer_inputs(600, causal=causal))
    for own in rows:
        true = own.logits.masked_fill(~own.visible, -torch.inf).softmax(-1) @ own.value
        torch.testing.assert_close(own.exact, true, rtol=0, atol=0)
        for _ in range(5):
            found = sampled_rows.estimate(own, sampled_rows.exact_keys(own, 0.05), 0.3, 0.05, drawn)
            right.append((found.out - true).norm(dim=-1) <= found.radius + 1e-9)
            partial.append(~found.all_keys)
            assert (found.keys <= own.visible.sum(-1)).all()
    some = torch.cat(partial)
    assert some.double().mean() > 0.3
    assert torch.cat(right)[some].double().mean() > 0.95


def test_the_radius_of_a_row_with_a_hidden_large_key_is_too_small_without_the_keys_of_largest_logit(script):
    """One key in 600 has nearly all the weight: a sample without it has no variance to tell."""
    layer = layer_inputs(600)
    layer.key[:, :, 300], layer.query[..., 0] = 0.0, 8.0
    layer.key[:, :, 300, 0] = 8.0
    sampled_rows, _, rows, drawn = sampled_heads(script, layer)
    share = {}
    for top in (0.05, 0.0):
        right = []
        for own in rows:
            true = own.logits.softmax(-1) @ own.value
            found = sampled_rows.estimate(own, sampled_rows.exact_keys(own, top), 0.3, 0.05, drawn)
            right.append((found.out - true).norm(dim=-1) <= found.radius + 1e-9)
        share[top] = float(torch.cat(right).double().mean())
    assert share[0.05] > 0.9  # 0.95 without the chance of 128 rows
    assert share[0.0] < 0.6


def test_rows_of_given_keys_are_attention_to_these_keys(script):
    layer = layer_inputs(60, groups=2)
    sampled_rows, chosen, _, _ = sampled_heads(script, layer)
    exact = exact_rows(*sampled_rows.prepared(layer), chosen)
    every = torch.arange(60).expand(len(chosen[0]), 60)
    for shared in (False, True):
        torch.testing.assert_close(sampled_rows.sampled_rows(layer, chosen, every, shared), exact, rtol=1e-4, atol=1e-5)


def test_the_tables_of_sampled_rows_compare_them_with_the_exact_ones(script):
    layer = layer_inputs(200)
    sampled_rows, _, rows, drawn = sampled_heads(script, layer)
    inputs = sampled_rows.Inputs("toy", [layer])
    intervals = sampled_rows.interval_lines("toy", rows, drawn)
    assert [line[1:3] for line in intervals[::3]] == [["with", "0.02"], ["without", "0.02"]]
    for line in sampled_rows.head_lines("toy", rows, drawn):
        assert line[8] == "0.109"
        assert line[4] == "0"
        assert float(line[3].removesuffix(" %")) <= float(line[2].removesuffix(" %"))
    assert sampled_rows.range_line("toy", rows)[0] == "toy"
    assert len(sampled_rows.time_line(inputs, rows, 0.0, drawn)) == 7
