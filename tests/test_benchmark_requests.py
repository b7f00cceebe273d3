"""The benchmark of whole requests stores every request, compares tokens, and names engines that are missing."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tests.sheets import rows_in
from tests.tools.workflows import tiny

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
METHOD = "clustered-tail:clusters=1,topk=1,cells=1,block=8,last=0"
CELLS = 7  # of a row of a detailed table


@pytest.fixture
def requests(script) -> ModuleType:
    return script("whole_requests")


@pytest.fixture
def measure(requests, run_script, tmp_path):
    """Runs the script on a small model, and returns its sheet."""
    folder, text = tiny.save("llama", tmp_path / "llama"), tmp_path / "text.txt"
    text.write_text("\n".join(tiny.documents(4)), "utf-8")

    def run(*words: str) -> str:
        options = ["--model", str(folder), "--text", str(text), "--prompts", "40", "--turns", "2", "--new-tokens", "5"]
        options += ["--threads", str(torch.get_num_threads()), "--out", str(tmp_path / "out.md")]
        run_script(requests, *options, "--methods", f"full:kernel=subquad {METHOD}", *words)
        return (tmp_path / "out.md").read_text("utf-8")

    return run


def test_requests_of_a_small_decoder(measure, tmp_path, request):
    keep = tmp_path / "kept"
    sheet = measure("--engines", "torch subquad", "--keep", str(keep))
    rows = rows_in(sheet, CELLS)
    cached = [
        f"subquad `{method}`{cache}" for method in ("full:kernel=subquad", METHOD) for cache in ("", ", growing cache")
    ]
    assert set(rows) == {(label, weights) for label in ("PyTorch", *cached) for weights in ("fp32", "bf16")}
    assert rows["PyTorch", "fp32"][4] == "all 5, all 5"
    for cache in ("", ", growing cache"):
        assert rows[f"subquad `full:kernel=subquad`{cache}", "fp32"][4] == "all 5, all 5"
    assert rows["PyTorch", "bf16"][3] == "1.00×"
    stored = {path: path.read_bytes() for path in keep.rglob("*.json")}
    assert len(stored) == 10
    answer = json.loads(next(iter(stored.values())))["requests"][0]["answer"]
    assert [len(each) for each in answer] == [5, 5]
    request.getfixturevalue("in_threads")
    # What is stored is not measured again, and rows of other engines stay on the sheet.
    assert rows_in(measure("--engines", "torch", "--keep", str(keep)), CELLS) == rows
    assert {path: path.read_bytes() for path in keep.rglob("*.json")} == stored
    again = rows_in(measure("--engines", "torch", "--keep", str(keep), "--fresh"), CELLS)
    changed = {path for path, text in stored.items() if path.read_bytes() != text}
    assert len(changed) == 2
    assert again.keys() == rows.keys()


@pytest.mark.usefixtures("in_threads")
def test_engines_that_are_not_installed_are_named_with_the_command(measure, script, monkeypatch, capsys):
    monkeypatch.setattr(script("engine_runs"), "installed_version", lambda package: None)
    sheet = measure("--engines", "torch llama.cpp openvino-genai")
    said = capsys.readouterr().err
    for absent in ("llama.cpp: llama-cpp-python, gguf", "openvino-genai: openvino, nncf, openvino-genai"):
        message = f"{absent} not installed: pip install -c constraints.txt -r benchmarks/request-requirements.txt"
        assert message in said
        assert message in sheet
    assert list(rows_in(sheet, CELLS)) == [("PyTorch", "fp32"), ("PyTorch", "bf16")]


def test_the_requirements_pin_every_package_of_the_engines(script):
    lines = (BENCHMARKS / "request-requirements.txt").read_text("utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    assert pinned == {package for packages in script("request_engines").PACKAGES.values() for package in packages}


def test_both_lists_of_requirements_have_the_same_versions():
    pins = [
        dict(line.split("==") for line in (BENCHMARKS / name).read_text("utf-8").splitlines() if "==" in line)
        for name in ("engines-requirements.txt", "request-requirements.txt")
    ]
    assert all(pins[0][package] == pins[1][package] for package in pins[0].keys() & pins[1].keys())


def test_each_compiled_row_has_a_process_of_its_own(requests):
    rows = requests.rows_of(["compiled", "torchao"], ["full", "clustered-tail"])
    assert len({row.process for row in rows}) == len(rows) == 10
    assert {row.process for row in requests.rows_of(["torch", "subquad"], ["full"])} == {"torch"}


class Fake:
    """A worker whose rows are functions of the token ids."""

    def __init__(self, runs, refused):
        self.runs, self.refused = runs, refused

    def ask(self, what, *arguments):
        if what == "prepare":
            return {row: reason for row, reason in self.refused.items() if row in arguments[1]}
        return 0.5, self.runs[arguments[0]](arguments[1])


@pytest.fixture
def store(requests, tmp_path):
    model = type("Decoder", (), {"identity": lambda self: ["decoder"]})()
    return requests.Store(tmp_path, model, requests.Job("decoder", 3, 4, 1, tmp_path))


def test_a_row_that_fails_is_listed_and_the_others_are_stored_at_once(requests, store, tmp_path):
    rows = requests.rows_of(["torch", "openvino"], [])
    fp32, bf16, *openvino = rows

    def answer(*tokens):
        return lambda ids: requests.Answer((0.5, 0.6, 0.7, 1.0), tokens)

    def broken(ids):
        raise requests.EngineError("RuntimeError: no kernel")

    runs = {row: answer(1, 2, 3, 4) for row in rows} | {bf16: broken, openvino[0]: answer(1, 2, 9, 4)}
    workers = {"torch": Fake(runs, {}), "openvino": Fake(runs, {openvino[1]: "uses f32"})}
    job, items = requests.Job("decoder", 3, 4, 1, tmp_path), [[1, 2, 3], [1, 2, 4]]
    failed = requests.measure(workers, store, job, rows, items)
    assert failed == {openvino[1]: "uses f32", bf16: "RuntimeError: no kernel"}
    figures = requests.figures_of(store, rows, items)
    assert [each.row for each in figures] == [fp32, *openvino[:1], *openvino[2:]]
    assert (figures[0].first, figures[0].whole) == (0.5, 1.0)
    assert figures[0].step == pytest.approx(0.1)
    assert [each.same for each in figures] == [(None, None), (2, 2), (None, None)]
    # In the next run only what is missing runs.
    runs[bf16] = answer(1, 2, 3, 5)
    runs[fp32] = broken
    assert requests.measure(workers, store, job, [fp32, bf16], items) == {}
    assert [each.same for each in requests.figures_of(store, [fp32, bf16], items)] == [(None, None), (3, 3)]


def test_an_engine_that_stops_early_is_an_error(script, requests):
    engines = script("request_engines")
    answer = requests.Answer((0.1, 0.2), (7, 8))
    assert engines.checked(answer, 2) is answer
    with pytest.raises(requests.EngineError, match="2 tokens and 2 times, where 3 were asked for"):
        engines.checked(answer, 3)


def test_the_conclusions_are_read_from_the_figures(requests):
    def figures(row, first, step, whole):
        return requests.Figures(row, first, step, whole, (None,), 1.0)

    Row = requests.Row
    measured = [
        figures(requests.USUAL, 2.0, 0.05, 8.0),
        figures(Row("llama.cpp", "4 bits (Q4_1)"), 6.0, 0.02, 9.0),
        figures(Row("subquad", "bf16", "full:kernel=subquad"), 1.5, 0.04, 6.0),
        figures(Row("subquad", "bf16", "clustered-tail", "growing"), 1.0, 0.03, 4.0),
    ]
    text = requests.conclusion("2,048 + 128 tokens", measured)
    assert "subquad's fastest is subquad `clustered-tail`, growing cache, bf16 (4.00 s: 1.00 to the first" in text
    assert "2.00× as fast as the fastest other, PyTorch, bf16 (8.00 s" in text
    assert "A later token is soonest in llama.cpp, 4 bits (Q4_1): 20.00 ms, and 30.00 in" in text
    assert "The first token is soonest" not in text
    line = requests.overview([("2,048 + 128", measured)]).splitlines()[-1]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "2,048 + 128",
        "8.0 s (bf16)",
        "–",
        "9.0 s (4 bits (Q4_1))",
        "6.0 s (bf16)",
        "4.0 s (bf16, growing cache)",
    ]
    assert "2.00×" in requests.table(measured, 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "tvm"], "no engine tvm; there are torch, subquad, compiled,"),
        (["--turns", "0"], "--turns must be from 1 to 8"),
        (["--turns", "1 2"], "--turns has 2 numbers for 3 prompts; give as many, or one"),
        (["--new-tokens", "1"], "--new-tokens must be at least 2"),
        (["--methods", "clustred"], "clustred"),
    ],
)
def test_mistakes_end_in_a_message(requests, run_script, words, message):
    with pytest.raises(SystemExit, match=message):
        run_script(requests, *words)


@pytest.mark.slow
def test_other_engines_give_the_tokens_of_pytorch(measure):
    for package in ("openvino", "nncf", "openvino_genai"):
        pytest.importorskip(package)
    rows = rows_in(measure("--engines", "torch openvino openvino-genai"), CELLS)
    for engine in ("OpenVINO", "OpenVINO GenAI"):
        assert rows[engine, "fp32"][4] == "all 5, all 5"


@pytest.mark.slow
def test_a_compiled_static_cache_is_measured_with_and_without_guards(requests, measure, monkeypatch):
    """Each row compiles in a process of its own, so two of the four stand for all.

    They use Inductor's shared cache, so that parts which another test compiled are not compiled again.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    every, kept = requests.rows_of, {(None, "static, compiled"), (METHOD, "static, compiled, unguarded")}

    def rows_of(*asked):
        return [row for row in every(*asked) if not row.is_compiled or (row.method, row.cache) in kept]

    monkeypatch.setattr(requests, "rows_of", rows_of)
    rows = rows_in(measure("--engines", "torch compiled", "--methods", METHOD), CELLS)
    for label in ("PyTorch, static, compiled cache", f"subquad `{METHOD}`, static, compiled, unguarded cache"):
        assert np.isfinite(float(rows[label, "bf16"][2]))
