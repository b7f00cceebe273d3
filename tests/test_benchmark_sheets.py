"""The benchmarks that make tables run at small sizes and say what they must."""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from matplotlib.image import imread

import subquad as sq
from subquad.workflows.bench_memory import RETURN_AT_ONCE

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """One of the scripts, as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)  # as for a script
    return importlib.import_module


@pytest.fixture
def made(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run a script as from the command line; the lines of its tables, by their first cell, as the file has them."""

    def run(name: str, *words: str) -> dict[str, list[str]]:
        threads = str(torch.get_num_threads())
        given = [f"benchmarks/{name}.py", "--threads", threads, *words, "--out", str(tmp_path / "out.md")]
        monkeypatch.setattr(sys, "argv", given)
        script(name).main()
        written = (tmp_path / "out.md").read_text("utf-8")
        assert f"`python benchmarks/{name}.py --threads" in written
        lines = [line.strip("|").split("|") for line in written.splitlines() if line.startswith("|")]
        return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}

    return run


def test_a_slope_is_the_exponent_of_a_power(script):
    assert script("sheet").slope([2, 4, 16], [3 * n**1.5 for n in (2, 4, 16)]) == pytest.approx(1.5)


def test_growth_has_the_exponents_of_the_work(made):
    short = ["--lengths", "128", "256", "--work", "256", "512", "--seconds", "0"]
    lines = made("growth", *short, "--methods", "full", "local:window=16", "linear", "linformer:k=8")
    assert (lines["full"][0], lines["full"][2]) == ("n²", "2.00")
    for method in ("local:window=16", "linear", "linformer:k=8"):
        assert float(lines[method][2]) == pytest.approx(1.0, abs=0.1)


def test_all_methods_of_the_growth_table_exist(script):
    for name in script("growth").PUBLISHED:
        sq.parse_method(name)


def test_the_grid_marks_what_was_not_run_and_leaves_out_what_saves_nothing(made, script, monkeypatch):
    monkeypatch.setattr(script("sheet"), "peak_alone", lambda load, method, threads: load.length << 20)
    lines = made(
        "linformer_grid", "--lengths", "32", "64", "--k", "16", "32", "--seconds", "0", "--limit", "1e-9"
    )  # fmt: skip
    first, second = lines["32"], lines["64"]  # of the last table: plain figures
    assert "–" not in first
    assert (second[0], second[1], second[3], second[4]) == ("–",) * 4
    assert lines["n"][2] == "k=16, ms"
    series = script("linformer_grid").Series(2, {32: 10.0})
    assert (series.ratio(32, 5.0), series.ratio(64, 5.0), series.ratio(64, 1.0)) == ("2.0×", "~8.0×", "~40×")
    grid = script("linformer_grid").Grid([16, 32], 1.0, 1.0, 0.0)
    grid.own["time", 32, 16] = 2.0
    grid.ms["full"].found[32] = 3.0
    assert "| 32 | 1.5× | – |" in grid.table("time", "full", [32])


def test_errors_of_features_are_those_of_the_formulas(made, script, tmp_path):
    module = script("feature_error")
    for norm, features in ((0.5, 32), (0.25, 16)):
        found = module.measured(norm, features, draws=300, independent=True)
        even = module.measured(norm, features, draws=300, independent=False)
        for kind in module.KINDS:
            assert found[kind] == pytest.approx(module.exact(kind, norm, features), rel=0.1)
            assert even[kind] < 1.02 * found[kind]
    figure = tmp_path / "figure.png"
    words = ["--lengths", "8", "16", "--norms", "0.5", "1.0", "--draws", "3", "--figure", str(figure)]
    assert len(made("feature_error", *words)["16"]) == 3 * len(module.KINDS)
    assert 0.005 < (imread(figure)[..., :3].min(-1) < 0.9).mean() < 0.5


def test_prefix_sums_leave_out_what_does_not_fit(made):
    lines = made("prefix_sums", "--lengths", "64", "128", "--seconds", "0", "--methods", "linear", "--gib", "0.0003")
    assert "–" not in lines["64"]
    assert (lines["128"][1], lines["128"][4]) == ("–", "–")
    assert lines["exponent"][1] == "–"


def test_the_masked_form_is_causal_linear_attention(script):
    q, k, v = torch.randn(3, 1, 2, 40, 8)
    expected = sq.attention(q, k, v, method="linear", is_causal=True)
    torch.testing.assert_close(script("prefix_sums").masked(q, k, v), expected)


def test_memory_is_given_a_token_and_sdpa_only_where_it_is_asked_for(made, script, monkeypatch):
    monkeypatch.setattr(script("sheet"), "peak_alone", lambda load, method, threads: (7 + load.causal) * load.length)
    words = ["--lengths", "64", "128", "--sdpa", "64", "--methods", "full", "linear", "--causal", "linear"]
    lines = made("memory_growth", *words)
    assert (lines["SDPA"], lines["linear"], lines["linear, causal"]) == (["7", "–"], ["7", "7"], ["8", "8"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_a_process_of_its_own_counts_the_matrix_of_a_naive_softmax(script):
    sheet: ModuleType = script("sheet")
    before = {name: os.environ.get(name) for name in RETURN_AT_ONCE}
    matrix = 4 * 2 * 2048**2
    peak = sheet.peak_alone(sheet.load_of(2048, heads=2), "naive", 1)
    assert matrix < peak < 4 * matrix
    assert {name: os.environ.get(name) for name in RETURN_AT_ONCE} == before
