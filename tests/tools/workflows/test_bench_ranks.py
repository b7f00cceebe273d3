"""`subquad bench` under torchrun, and the commands that run in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from subquad.tools.bench.ranks_bench import MODES
from subquad.tools.cli.main import app

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_methods_on_two_ranks(tmp_path: Path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    given = ["--methods", "linear i-clustered:clusters=400,topk=400", "--lengths", "33,330", "--heads", "2"]
    done = subprocess.run(
        [*launcher, "-m", "subquad", "bench", *given, "--head-dim", "8", "--quick", "--json", "--out", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)  # one process prints
    assert found == json.loads((tmp_path / "ranks.json").read_text())
    assert found["ranks"] == 2
    rows = {(row["method"], row["mode"], row["length"]): row for row in found["rows"]}
    assert len(rows) == 3 * 2 * len(MODES)
    for (method, mode, _), row in rows.items():
        if row["reason"] is not None:
            assert mode != "heads"
            assert f"mode='{mode}' is not available for {method.partition(':')[0]!r}" in row["reason"]
            continue
        assert 0 < row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["error"] < 1e-4 if "linear" not in method else row["error"] > 0.1
    linear = [rows["linear", "summary", length] for length in (33, 330)]
    assert linear[0]["bytes"] == linear[1]["bytes"] == 2 * 8 * 9 * 4  # heads, features, value and weight, fp32
    assert [row["exchanges"] for row in linear] == [1, 1]
    assert rows["full", "heads", 330]["bytes"] > 9 * rows["full", "heads", 33]["bytes"]
    assert "| `linear` | summary | 330 |" in (tmp_path / "ranks.md").read_text()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    """The environment of one of two processes."""

    def as_process(number: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", str(number))

    return as_process


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "x"], "subquad inspect runs in one process, but torchrun started 2: start it without torchrun"),
        (["calibrate", "x"], "subquad calibrate runs in one process"),
        (
            ["plan", "--executor", "processes"],
            "--executor processes starts processes of its own, but torchrun started 2",
        ),
        (["plan", "--lengths", "long"], "length 'long' is not a whole number"),
        (["bench", "--gpu-sheet"], "--gpu-sheet is for one process, but torchrun started 2; leave it out"),
        (["bench", "--compare", "x.json"], "--compare is for one process"),
    ],
)
def test_what_runs_in_one_process_is_refused_by_the_first(words: list[str], message: str, launched):
    launched(0)
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 2
    assert message in first.stderr
    assert len(first.stderr.strip().splitlines()) == 1
    launched(1)
    other = CliRunner().invoke(app, words)
    assert (other.exit_code, other.output) == (2, "")
