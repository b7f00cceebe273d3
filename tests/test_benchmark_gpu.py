"""benchmarks/on_gpu.py, at tiny sizes on the CPU."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[1]


def on_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "on_gpu.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_a_dry_run_writes_the_results_of_every_part(tmp_path: Path):
    done = on_gpu("--out", str(tmp_path), "--dry-run", "--minutes", "8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": exit 0 after") == 5, done.stdout
    assert json.loads((tmp_path / "environment.json").read_text("utf-8"))["backends"]["triton"] == "available"
    cells = json.loads((tmp_path / "gpu-sheet.json").read_text("utf-8"))["cells"]
    assert {cell["method"] for cell in cells} == {"full", "cudnn", "clustered", "linear"}
    assert all(cell["eager_ms"] > 0 for cell in cells)
    rows = json.loads((tmp_path / "models.json").read_text("utf-8"))
    assert {row["model"] for row in rows} == {"Llama-3.2-1B", "Qwen3-0.6B", "bge-m3"}
    assert all(row["cosine"] > 0.99 for row in rows), rows
    assert "12 passed" in (tmp_path / "tests-of-kernels.txt").read_text("utf-8")
    assert "causal clustered-tail" in (tmp_path / "profile.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_names_the_dry_run(tmp_path: Path):
    done = on_gpu("--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "there is no GPU here; --dry-run runs everything at tiny sizes" in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_sdpas_output_no_method_takes_its_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as for a script
    on_gpu = importlib.import_module("on_gpu")

    class Model:
        """Runs with a method alone."""

        device, method = torch.device("cpu"), None

        def __call__(self, tokens, **extra):
            if self.method is None:
                raise RuntimeError("out of memory")
            return SimpleNamespace(last_hidden_state=torch.ones(1, len(self.method), 2))

    def swap(model, method):
        model.method = method

    hf = SimpleNamespace(
        swap=swap, restore=lambda model: swap(model, None), describe=lambda model: SimpleNamespace(methods=["one"])
    )
    exact, *others = on_gpu.rows_of("a model", "llama", Model(), 8, hf, tiny=True)
    assert exact["reason"] == "out of memory"
    assert [row.keys() for row in others] == [{"model", "tokens", "method", "ms"}] * 2
