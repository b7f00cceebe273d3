"""`subquad bench --steps`: exact attention of few queries, relative to the machine's own read."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from subquad.core.errors import InputError
from subquad.kernels import native
from subquad.methods.full import FAST_EXACT
from subquad.tools.bench import steps_bench
from subquad.tools.bench.settings import BenchSettings
from subquad.tools.bench.steps_bench import QUERIES, check, measure
from subquad.tools.bench.steps_page import markdown
from subquad.tools.cli.main import app

SMALL = BenchSettings(
    steps=True, lengths=(64,), passes=("forward",), heads=4, kv_heads=2, head_dim=16, quick=True, threads=1
)


def test_each_shape_has_both_calls_and_the_read(tmp_path):
    settings = replace(SMALL, dtypes=("float32", "bfloat16"))
    report = measure(settings, tmp_path).report(settings)
    rows = {(row["method"], row["dtype"], row["queries"]): row for row in report["rows"]}
    assert set(rows) == {(m, d, n) for m in ("full", FAST_EXACT) for d in settings.dtypes for n in QUERIES}
    for (method, dtype, _), row in rows.items():
        assert row["reason"] is None
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["gb_per_s"] > 0
        assert row["of_read"] > 0
        assert row["error"] < (1e-5 if dtype == "float32" else 2e-2)
        assert method != "full" or row["speedup"] == 1.0
    key_bytes = 2 * 2 * 64 * 16 * 4  # keys and values of two heads
    one = rows["full", "float32", 1]
    assert one["gb_per_s"] == pytest.approx(key_bytes / one["ms"] / 1e6)
    assert len(report["reads"]) == 2 * len(QUERIES)
    page = markdown(report)
    assert "4 query heads on 2 key heads of width 16" in page
    assert "## bfloat16" in page
    speeds = [read["gb_per_s"] for read in report["reads"] if read["dtype"] == "float32"]
    assert f"The read: {min(speeds):.1f}–{max(speeds):.1f} GB/s at 64 keys, from the slowest" in page
    assert report["noise"]["says"] in page


def test_rows_name_what_ran(tmp_path):
    settings = replace(SMALL, dtypes=("float32",), lengths=(64, 1024))
    report = measure(settings, tmp_path).report(settings)
    by_sdpa = {(r["method"], r["keys"], r["queries"]) for r in report["rows"] if r["sdpa_instead"]}
    page = markdown(report)
    assert (FAST_EXACT, 64, 1) in by_sdpa
    assert f"| `{FAST_EXACT}`, by SDPA | 64 | 1 |" in " ".join(page.split())
    assert "so it ran" in page
    if native.is_vectorised():
        assert {keys for method, keys, _ in by_sdpa} == {64}
        assert f"| `{FAST_EXACT}` | 1,024 | 1 |" in " ".join(page.split())


def test_both_calls_are_causal_from_the_offset():
    query, key, value = steps_bench._inputs(replace(SMALL, head_dim=8), "float64", 40, 4)
    sdpa, ours = steps_bench._sdpa(query, key, value)(), steps_bench._subquad(query, key, value)()
    torch.testing.assert_close(sdpa, ours)
    key[:, :, 38:], value[:, :, 38:] = 100.0, 100.0  # the last two tokens, which the first two queries do not see
    later = steps_bench._sdpa(query, key, value)()
    torch.testing.assert_close(later[:, :, :2], sdpa[:, :, :2])
    assert not torch.allclose(later[:, :, 2:], sdpa[:, :, 2:])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": ("linear",)}, "--methods is given, but --steps measures forward passes of causal SDPA and"),
        ({"causal": True}, "--causal is given, but --steps"),
        ({"passes": ("forward+backward",)}, "--passes is given, but --steps"),
        ({"call_limit": 5.0}, "--call-limit is given, but --steps"),
        ({"kv_heads": 3}, "--kv-heads 3 does not divide the 4 query heads"),
        ({"kv_heads": 0}, "kv-heads 0 must be at least 1"),
        ({"lengths": (31,)}, "--lengths 31 is less than the 32 queries"),
        ({"dtypes": ("int8",)}, "no dtype 'int8'"),
    ],
)
def test_what_does_not_go_together_is_refused(changed, message):
    with pytest.raises(InputError, match=message):
        check(replace(SMALL, **changed))


def run(*words, out):
    return CliRunner().invoke(app, ["bench", *words, "--out", str(out)])


SHAPE = ("--quick", "--lengths", "64", "--heads", "2", "--head-dim", "8")


def test_the_flag_measures_steps_alone(tmp_path):
    done = run("--steps", *SHAPE, "--dtypes", "float32", "--json", out=tmp_path)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "steps.json").read_text())
    assert report["settings"]["kv_heads"] == 2
    assert (tmp_path / "steps.md").is_file()
    assert not (tmp_path / "bench.json").exists()
    shown = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "Exact attention of few queries" in shown.output
    again = run("--steps", *SHAPE, "--dtypes", "float32", out=tmp_path)
    assert "Exact attention of few queries" in again.output


def test_without_the_flag_no_steps_are_measured(tmp_path):
    done = run(*SHAPE, "--methods", "full", "--json", out=tmp_path)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["kind"] == "subquad bench"
    assert not (tmp_path / "steps.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kv-heads", "2", *SHAPE), "--kv-heads 2 is for --steps, which is not given"),
        (("--steps", "--gpu-sheet"), "--gpu-sheet does not go with --steps"),
        (("--steps", "--compare", "bench.json"), "--compare does not go with --steps"),
        (("--steps", "--executor", "processes", "--workers", "2"), "--executor does not go with --steps"),
    ],
)
def test_other_modes_refuse_it(words, message, tmp_path):
    done = run(*words, out=tmp_path)
    assert done.exit_code == 2
    assert message in done.output


def test_the_defaults_are_a_small_decoders(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(steps_bench, "measure", lambda settings, out, progress: made.append(settings) or 1 / 0)
    run("--steps", out=tmp_path)
    run("--steps", "--heads", "8", out=tmp_path / "8")
    shapes = [(s.lengths, s.dtypes, s.heads, s.kv_heads) for s in made]
    usual = (2048, 8192, 32768), ("float32", "bfloat16")
    assert shapes == [(*usual, 9, 3), (*usual, 8, None)]
