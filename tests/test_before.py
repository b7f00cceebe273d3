"""What an earlier version wrote is read by this one: `tests/before/make.py` says how the files were made."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertModel
from typer.testing import CliRunner

import subquad as sq
from subquad.cli import app
from subquad.papers import load
from subquad.papers import run as experiment_run
from subquad.papers.run import reproduce
from subquad.report.bench_changes import changes
from subquad.report.bench_tables import rich_table
from subquad.report.page import html
from subquad.report.tables import markdown
from subquad.training.run import begin_with, read_saved
from subquad.training.settings import read_overrides, settings_of
from subquad.workflows import bench, calibrate, compare, inspect, machine
from subquad.workflows import train as train_workflow
from subquad.workflows.bench_old import read_old
from subquad.workflows.bench_plans import resolved
from subquad.workflows.compare_report import report_of
from subquad.workflows.inspect_report import report_of as inspection_of
from tests.before.inputs import (
    COMPARISON,
    EXPERIMENTS,
    FIT,
    FITTED,
    INSPECTION,
    LAYERS,
    METHODS,
    TRAINING,
    attention_inputs,
    hardware,
    hidden,
    tokens,
    versions,
)

BEFORE = Path(__file__).parent / "before"
WRITTEN = json.loads((BEFORE / "methods.json").read_text())


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A copy of the files, as the folder in which we are; the machine is the one on which they were made."""
    shutil.copytree(BEFORE, tmp_path / "before")
    monkeypatch.chdir(tmp_path / "before")
    for module in (machine, experiment_run, train_workflow):
        monkeypatch.setattr(module, "versions", versions)
        monkeypatch.setattr(module, "hardware", hardware)
    return tmp_path / "before"


@pytest.fixture(scope="module")
def wanted():
    return {name: load_file(BEFORE / f"{name}.safetensors") for name in ("attention", "layers", "outputs")}


def near(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def kept(folder):
    """The units of a run, of which there is one in the folder."""
    (run,) = (path for path in (folder / ".progress").iterdir() if path.is_dir())
    return {path: path.read_bytes() for path in run.iterdir()}


def resumed(folder, units):
    """Whether these units are as they were, with others beside them."""
    now = kept(folder)
    return {path: now[path] for path in units} == units and len(now) > len(units)


def without_times(data):
    """Plain data without seconds, and without what is worked out from them."""
    times = ("seconds", "runtime", "per_second", "preparation_time")
    if isinstance(data, dict):
        return {key: without_times(value) for key, value in data.items() if not key.endswith(times)}
    return [without_times(item) for item in data] if isinstance(data, list) else data


def leaves(data):
    if isinstance(data, dict):
        return [(f"{key}/{name}", leaf) for key in data for name, leaf in leaves(data[key])]
    if isinstance(data, list):
        return [(f"{i}/{name}", leaf) for i, item in enumerate(data) for name, leaf in leaves(item)]
    return [("", data)]


def same_figures(actual, expected):
    """The same plain data, with numbers to rounding."""
    actual, expected = dict(leaves(without_times(actual))), dict(leaves(without_times(expected)))
    assert actual.keys() == expected.keys()
    for name, figure in expected.items():
        is_number = isinstance(figure, float)
        assert actual[name] == (pytest.approx(figure, rel=1e-3, abs=1e-4) if is_number else figure), name


# ---------------------------------------------------------------------- methods


def renamed(written):
    """A method's plain data, with the names that its settings have now."""
    new = {"tilted-pool": {"segments": "pools"}, "routing": {"window": "cluster_size"}}.get(written["name"], {})
    written = {new.get(setting, setting): value for setting, value in written.items()}
    return {name: renamed_text(value) if name == "methods" else value for name, value in written.items()}


def renamed_text(written):
    return re.sub(r"(routing:[^+]*)window=", r"\1cluster_size=", written.replace("segments=", "pools="))


# Settings that have come since, with the defaults that mean what there was before.
SINCE = {name: {"space": "queries", "refine": 0} for name in ("clustered", "i-clustered")}
SINCE["full"] = {"positions": "none"}


@pytest.mark.parametrize("text", METHODS)
def test_a_method_is_the_same_in_data_and_in_text(text):
    written, method = WRITTEN[text], sq.parse_method(text)
    since = SINCE.get(method.name, {})
    assert method.to_dict() == renamed(written["to_dict"]) | since
    assert sq.from_dict(written["to_dict"]) == method == sq.parse_method(written["text"])
    assert str(method) == renamed_text(written["text"])
    assert type(method)().to_dict() == renamed(written["default"]) | since


@pytest.mark.parametrize("text", METHODS)
def test_a_method_gives_what_it_gave(text, wanted):
    bound = sq.parse_method(text).bind(heads=2, head_dim=8, max_length=24).eval()
    with torch.no_grad():
        near(bound(*attention_inputs()), wanted["attention"][text])
        with sq.use_backend("reference"):
            near(bound(*attention_inputs()), wanted["attention"][text])


@pytest.mark.parametrize("text", LAYERS)
def test_a_layers_state_is_read(text, wanted):
    layer = sq.nn.MultiheadAttention(16, 2, method=text, max_length=24).eval()
    state = {name.removeprefix(f"{text}/"): x for name, x in wanted["layers"].items() if name.startswith(f"{text}/")}
    out = state.pop("/out")
    layer.load_state_dict(state)
    with torch.no_grad():
        near(layer(hidden()), out)


# ---------------------------------------------------------------------- models


def outputs(model):
    with torch.inference_mode():
        return model.eval()(**tokens()).last_hidden_state


@pytest.mark.parametrize("name", FITTED)
def test_an_adapter_gives_what_it_gave(files, wanted, name):
    model = BertModel.from_pretrained("bert").eval()
    swapped = sq.hf.load_adapter(model, f"adapters/{name}")
    assert {str(method) for method in swapped.methods.values()} == {renamed_text(FITTED[name])}
    near(outputs(model), wanted["outputs"][f"adapters/{name}"])


def test_a_saved_swapped_model_gives_what_it_gave(files, wanted):
    near(outputs(BertModel.from_pretrained("swapped")), wanted["outputs"]["swapped"])


def test_a_saved_swapped_model_takes_its_adapter(files, wanted):
    with pytest.warns(UserWarning, match="adapter"):
        model = BertModel.from_pretrained("swapped-learned").eval()
    sq.hf.load_adapter(model, "adapters/lha")
    near(outputs(model), wanted["outputs"]["adapters/lha"])


# ---------------------------------------------------------------------- commands


def test_an_interrupted_comparison_goes_on(files):
    units = kept(Path("compare-cut"))
    assert len(units) == 3 + 3 + 10
    done = compare.measure(
        compare.CompareSettings(model="bert", text=(Path("text"),), **COMPARISON), Path("compare-cut")
    )
    assert done.resumed == len(units)
    assert resumed(Path("compare-cut"), units)
    report = report_of(done)
    before = json.loads(Path("compare/report.json").read_text())
    for now, then in zip(report["methods"], before["methods"], strict=True):
        assert {key: now[key] for key in ("method", "status", "layers")} == {
            key: then[key] for key in ("method", "status", "layers")
        }
        assert then["settings"].items() <= now["settings"].items()  # some methods have settings more by now
        same_figures(now["quality"], then["quality"])
        same_figures(now["fidelity"], then["fidelity"])
    assert report.keys() == before.keys()


def test_the_report_of_a_comparison_is_drawn(files):
    report = json.loads(Path("compare/report.json").read_text())
    assert COMPARISON["methods"][1] in markdown(report)
    assert COMPARISON["methods"][1] in html(report, {})


def test_a_bench_is_compared_with_the_one_before(files):
    old = read_old(Path("bench"), resolved(bench.BenchSettings(lengths=(32, 64))))
    assert {cell["status"] for cell in old["cells"]} == {"measured"}
    assert changes(old, old, "bench")
    assert rich_table(old)


def test_an_interrupted_calibration_goes_on(files, monkeypatch):
    monkeypatch.setattr(calibrate, "EVERY", 10)
    ((checkpoint, before),) = kept(Path("calibrate-cut")).items()
    steps = []
    fitted = calibrate.calibrate(
        calibrate.CalibrateSettings(model="bert", text=(Path("text"),), **FIT),
        Path("calibrate-cut"),
        lambda what, done, total: steps.append(done),
    )
    assert 0 < min(steps[1:]) == 20
    assert list(kept(Path("calibrate-cut"))) == [checkpoint]
    assert checkpoint.read_bytes() != before
    then = sq.hf.read_adapter("calibrate")
    assert len(fitted.record["text"].pop("fingerprint")) == 16  # has come since
    same_figures(fitted.record, then.record)
    for number, bound in fitted.bounds.items():
        for name, tensor in bound.learned.state_dict().items():
            torch.testing.assert_close(tensor, then.tensors[number][name], atol=1e-3, rtol=1e-3)


def test_an_interrupted_inspection_goes_on(files):
    units = kept(Path("inspect-cut"))
    settings = inspect.InspectSettings(model="bert", text=(Path("text"),), **INSPECTION)
    done = inspect.measure(settings, Path("inspect-cut"))
    assert done.resumed == len(units) == 3
    assert resumed(Path("inspect-cut"), units)
    assert inspection_of(done, settings)["methods"]


# ---------------------------------------------------------------------- training


def settings():
    return settings_of("masked-copy", read_overrides(TRAINING))


def test_an_interrupted_training_run_goes_on(files):
    steps = []
    record = train_workflow.run(
        settings(),
        Path("train-cut"),
        data=None,
        device="cpu",
        resume=True,
        progress=lambda *said: steps.append(said[1]),
    )
    assert min(steps) >= 16
    then = json.loads(Path("train/results.json").read_text())
    then["settings"]["model"] |= {"piece": 0, "memory": 0}  # which have come since
    then["settings"]["parallel"] = {"sequence": 1, "mode": "auto", "fsdp": False, "timeout": 1800.0}  # this, too
    for part in ("task", "settings", "model", "parameters", "test", "validation", "baselines", "steps", "best_step"):
        same_figures({part: record[part]}, {part: then[part]})
    same_figures(record["history"], then["history"])


def test_a_finished_training_run_is_known_and_its_model_is_read(files):
    result = CliRunner().invoke(
        app, ["train", "masked-copy", "--out", "train", *(w for o in TRAINING for w in ("--set", o))]
    )
    assert result.exit_code == 0
    assert "holds this run, finished" in " ".join(result.output.split())
    model = settings().task.model(settings().model)
    saved = read_saved(type(model), Path("train/model"))
    assert {str(method) for method in sq.hf.describe(saved).methods.values()} == {"lha:buckets=2"}
    begin_with(model, Path("train/model"))
    assert torch.equal(next(model.parameters()), next(saved.parameters()))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_cells_of_an_experiment_are_read(files, name):
    out = Path("reproduce", name)
    cells = {path: path.read_bytes() for path in (out / "cells").glob("*.json")}
    _, results, _ = reproduce(load(name), "smoke", out, resume=True)
    assert {path: path.read_bytes() for path in (out / "cells").glob("*.json")} == cells
    then = json.loads((out / "results.json").read_text())
    assert json.loads(json.dumps([asdict(table) for table in results.tables])) == then["results"]["tables"]
