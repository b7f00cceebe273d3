"""The benchmark of engines measures those that are installed, names the others, and says where each is the fastest."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from subquad.core.errors import InputError
from tests.sheets import rows_in
from tests.tools.workflows import tiny

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FLASH_ATTENTION = ("with flash attention", "without flash attention")
METHOD = "clustered-tail:clusters=1,topk=1,cells=1,block=8,last=0"


@pytest.fixture
def engines(script) -> ModuleType:
    return script("engines")


def measure(engines: ModuleType, run_script: Callable[..., None], tmp_path: Path, name: str, *words: str) -> str:
    """The sheet of a small model, with one turn."""
    folder, text = tiny.save(name, tmp_path / name), tmp_path / "text.txt"
    text.write_text("\n".join(tiny.documents(4)), "utf-8")
    options = ["--models", str(folder), "--text", str(text), "--lengths", "40", "--prompts", "40", "--turns", "1"]
    options += ["--prompt-turns", "1", "--methods", f"full:kernel=subquad {METHOD}"]
    options += ["--threads", str(torch.get_num_threads()), "--out", str(tmp_path / "out.md"), *words]
    run_script(engines, *options)
    return (tmp_path / "out.md").read_text("utf-8")


def test_an_encoder_in_pytorch_and_with_methods(engines, run_script, tmp_path):
    sheet = measure(engines, run_script, tmp_path, "bert", "--engines", "torch subquad")
    rows = rows_in(sheet)
    assert list(rows) == [
        ("PyTorch", "fp32"),
        ("PyTorch", "bf16"),
        ("subquad `full:kernel=subquad`", "fp32"),
        ("subquad `full:kernel=subquad`", "bf16"),
        (f"subquad `{METHOD}`", "fp32"),
        (f"subquad `{METHOD}`", "bf16"),
    ]
    assert rows["PyTorch", "fp32"][1:] == ["1.00×", "1.0000"]
    assert rows["subquad `full:kernel=subquad`", "fp32"][2] == "1.0000"
    assert 0.5 < float(rows[f"subquad `{METHOD}`", "fp32"][2]) < 1.0
    assert 0.99 < float(rows["PyTorch", "bf16"][2]) <= 1.0
    assert "with exact attention, " in sheet


@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize("name", ["llama", "opt"])  # the causal model calls its base model, or the decoder in it
def test_a_decoder_is_compared_by_its_next_tokens(engines, run_script, tmp_path, name):
    rows = rows_in(measure(engines, run_script, tmp_path, name, "--engines", "torch subquad"))
    assert rows["PyTorch", "fp32"][2:] == ["0.00000", "1.0000"]
    assert float(rows["subquad `full:kernel=subquad`", "fp32"][2]) < 1e-4
    assert float(rows["PyTorch", "bf16"][2]) > 0
    assert float(rows[f"subquad `{METHOD}`", "fp32"][2]) > 1e-4


@pytest.mark.usefixtures("in_threads")
def test_engines_that_are_not_installed_are_named_with_the_command_and_the_others_run(
    engines, script, run_script, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(script("engine_runs"), "installed_version", lambda package: None)
    sheet = measure(engines, run_script, tmp_path, "bert", "--engines", "torch openvino onnxruntime")
    said = capsys.readouterr().err
    for absent in ("openvino: openvino, nncf", "onnxruntime: onnxruntime, onnx, onnxscript"):
        message = f"{absent} not installed: pip install -c constraints.txt -r benchmarks/engines-requirements.txt"
        assert message in said
        assert f"- {message}" in sheet
    assert list(rows_in(sheet)) == [("PyTorch", "fp32"), ("PyTorch", "bf16")]


def test_the_requirements_pin_every_package_of_the_engines(script):
    lines = (BENCHMARKS / "engines-requirements.txt").read_text("utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    assert pinned == {package for packages in script("engine_workers").PACKAGES.values() for package in packages}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_other_engines_give_what_pytorch_gives(engines, run_script, tmp_path, name):
    for package in ("openvino", "nncf", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    keep = tmp_path / "kept"
    words = ["--engines", "openvino xattention onnxruntime", "--keep", str(keep)]
    rows = rows_in(measure(engines, run_script, tmp_path, name, *words))
    for engine in ("OpenVINO", "ONNX Runtime"):
        fidelity = rows[engine, "fp32"][2]
        assert fidelity == "1.0000" if name == "bert" else float(fidelity) < 1e-4
    assert ("ONNX Runtime", "int8 dynamic") in rows
    sparse = [float(cells[2]) for (engine, _), cells in rows.items() if engine.startswith("OpenVINO XAttention")]
    assert len(sparse) == (2 if name == "llama" else 0)
    assert all(kl < 0.1 for kl in sparse)
    kept = {path: path.stat().st_mtime_ns for path in keep.rglob("*") if path.is_file()}
    stems = {"openvino", "openvino-int8", "onnx", "onnx-int8"} | ({"openvino-stateful"} if name == "llama" else set())
    assert {path.parent.name.split("-40-")[0] for path in kept} == stems
    measure(engines, run_script, tmp_path, name, *words)
    assert {path: path.stat().st_mtime_ns for path in keep.rglob("*") if path.is_file()} == kept  # not converted again


def test_windows_are_refused_before_a_model_is_converted(script):
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    attend = script("engine_models").attend_without_mask
    layer = torch.nn.Module()
    out, _ = attend(layer, q, k, v, None, scaling=0.5, sliding_window=None)
    torch.testing.assert_close(out, ((0.5 * q @ k.mT).softmax(-1) @ v).transpose(1, 2))
    with pytest.raises(ValueError, match="sliding_window"):
        attend(layer, q, k, v, None, scaling=0.5, sliding_window=4)


class Fake:
    """A worker whose rows are functions of the token ids."""

    def __init__(self, runs, refused):
        self.runs, self.refused = runs, refused

    def ask(self, what, *arguments):
        return self.refused if what == "prepare" else self.runs[arguments[0]](arguments[1])


def test_a_row_that_fails_is_listed_with_its_reason_and_the_others_go_on(engines, tmp_path):
    rows = engines.rows_of(["torch", "openvino", "onnxruntime"], [], causal=False)
    fp32, bf16, *openvino, wrong, _ = rows

    def broken(ids):
        raise engines.EngineError("RuntimeError: no kernel")

    runs = {row: lambda ids: (0.5, (np.ones((1, 4), np.float32),)) for row in rows} | {bf16: broken}
    runs[wrong] = lambda ids: (0.1, (np.full((1, 4), np.nan, np.float32),))
    workers = {"torch": Fake(runs, {}), "openvino": Fake(runs, {openvino[1]: "computes in f32"})}
    workers["onnxruntime"] = Fake(runs, {})
    model = type("Encoder", (), {"is_causal_lm": False})()
    job = engines.Job("encoder", 3, 1, tmp_path)
    figures, failed = engines.measured(workers, model, job, rows, [[1, 2, 3], [1, 2, 4]])
    reasons = {openvino[1]: "computes in f32", bf16: "RuntimeError: no kernel", wrong: "its outputs are not finite"}
    assert failed == reasons
    assert [each.row for each in figures] == [fp32, openvino[0], openvino[2], rows[-1]]
    assert figures[0].ms == (500, 500, 500)
    assert figures[1].fidelity == {"cosine": "1.0000"}


def test_the_winners_are_read_from_the_figures(engines):
    def figures(row, ms, fidelity):
        return engines.Figures(row, (ms - 1, ms, ms + 1), 100 / ms, {"cosine": fidelity})

    measured = [
        figures(engines.EXACT, 100, "1.0000"),
        figures(engines.Row("openvino", "bf16"), 50, "0.9999"),
        figures(engines.Row("onnxruntime", "int8 dynamic"), 40, "0.9800"),
        figures(engines.Row("subquad", "bf16", "clustered-tail"), 51, "0.9950"),
    ]
    text = engines.winners("Model, 512 tokens", measured)
    assert "with exact attention, OpenVINO, bf16 is the fastest (50 ms, cosine 0.9999)" in text
    assert "fastest of all rows is ONNX Runtime, int8 dynamic (40 ms, 1.25× as fast as that; cosine 0.9800)" in text
    assert "subquad `clustered-tail`, bf16 (51 ms, 0.98× as fast as that; the quartiles of the two overlap;" in text
    assert "It is also the fastest of all rows" in engines.winners("Model", measured[:2])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "tvm"], "no engine tvm; there are torch, flexattention, subquad, zentorch, openvino, "),
        (["--turns", "0"], "--turns and --prompt-turns must be at least 1"),
        (["--methods", "clustred"], "clustred"),
    ],
)
def test_mistakes_end_in_a_message(engines, run_script, words, message):
    with pytest.raises(SystemExit, match=message):
        run_script(engines, *words)


def test_the_published_table_has_the_fastest_of_each_kind(engines, tmp_path):
    """subquad's row keeps the floor of compare: a faster one beyond it is left out."""

    def figures(engine, numbers, ms, kl, method=None):
        return engines.Figures(
            engines.Row(engine, numbers, method), (ms, ms, ms), 1.0, {"KL": kl, "same top token": "1"}
        )

    rows = [
        figures("torch", "fp32", 4000.0, "0.00000"),
        figures("torch", "bf16", 2000.0, "0.00100"),
        figures("openvino", "fp32", 3500.0, "0.00000"),
        figures("openvino", "bf16", 1800.0, "0.00100"),
        figures("openvino", "int8 weights", 1500.0, "0.01000"),
        figures("subquad", "fp32", 3000.0, "0.00010", "clustered-tail"),
        figures("subquad", "bf16", 1200.0, "0.00190", "full:kernel=subquad"),
        figures("subquad", "bf16", 900.0, "0.00210", "clustered-tail"),
    ]
    page = tmp_path / "index.md"
    page.write_text("before\n<!-- table:begin -->\nold\n<!-- table:end -->\nafter\n")
    engines.publish(page, engines.overview([("A decoder, 2,048 tokens", rows), ("Another", rows[:1])]))
    *_, full, alone, end, after = page.read_text().splitlines()
    assert [cell.strip() for cell in full.split("|")[1:-1]] == [
        "A decoder, 2,048 tokens",
        "4,000 ms",
        "2,000 ms",
        "1,800 ms (OpenVINO, bf16)",
        "**1,200 ms** (`full:kernel=subquad`, bf16)",
        "KL 0.00190",
        "1.50×",
    ]
    assert [cell.strip() for cell in alone.split("|")[2:-1]] == ["4,000 ms", *"–" * 5]
    assert (end, after) == ("<!-- table:end -->", "after")


def test_outputs_that_a_run_computes_afterwards_are_not_in_its_time(script, monkeypatch):
    workers, calls = script("engine_workers"), []
    clock = SimpleNamespace(sleep=lambda seconds: None, perf_counter=lambda: calls.append("clock") or len(calls))
    monkeypatch.setattr(workers, "time", clock)

    def states():
        calls.append("states")
        return (np.ones(3),)

    seconds, outputs = workers.timed(lambda ids: calls.append("prefill") or states, np.ones((1, 3)))
    assert calls == ["clock", "prefill", "clock", "states"]
    assert seconds == 2
    assert len(outputs) == 1


def test_every_engine_has_rows_and_llama_cpp_none_of_an_encoder(engines):
    packages = set(engines.PACKAGES)
    assert {row.engine for row in engines.rows_of(packages, ["clustered-tail"], causal=True)} == packages
    encoder = engines.rows_of(packages, ["clustered-tail"], causal=False)
    assert {row.engine for row in encoder} == packages - {"llama.cpp", "xattention"}
    exact = {
        str(row) for row in engines.rows_of(["llama.cpp", "openvino", "xattention"], [], causal=True) if row.is_exact
    }
    flash = {f"llama.cpp {attention}, {numbers}" for attention in FLASH_ATTENTION for numbers in ("bf16", "fp16")}
    assert exact == flash | {"PyTorch, fp32", "OpenVINO, fp32", "OpenVINO, bf16"}


def test_formats_choose_the_rows(engines):
    packages = list(engines.PACKAGES)
    rows = engines.rows_of(packages, ["clustered-tail"], True, ["fp16", "int8"])
    assert [str(row) for row in rows] == [
        "PyTorch, fp32",
        "OpenVINO, int8 weights",
        "ONNX Runtime, int8 dynamic",
        "llama.cpp with flash attention, fp16",
        "llama.cpp without flash attention, fp16",
    ]
    with pytest.raises(InputError, match=r"there are fp32, bf16, int8$"):
        engines.rows_of(["torch", "openvino"], [], True, ["int2"])


@pytest.mark.parametrize(("features", "numbers"), [({}, "fp32"), ({"amx_bf16": True}, "bf16")])
def test_sparse_attention_of_openvino_runs_in_the_fastest_format(engines, monkeypatch, features, numbers):
    monkeypatch.setattr(engines, "cpu_capabilities", lambda: features)
    _, *sparse = engines.rows_of(["xattention"], [], causal=True)
    assert [row.numbers for row in sparse] == [numbers, numbers]


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "AVX2",
    reason="transformers' FlexAttention is wrong with AVX2 alone (torch 2.13.0, transformers 5.23.0)",
)
def test_flexattention_is_exact(engines, run_script, tmp_path):
    rows = rows_in(measure(engines, run_script, tmp_path, "llama", "--engines", "flexattention"))
    assert float(rows["PyTorch, FlexAttention compiled", "fp32"][2]) < 1e-4
    assert float(rows["PyTorch, FlexAttention compiled", "bf16"][2]) < 1e-2
