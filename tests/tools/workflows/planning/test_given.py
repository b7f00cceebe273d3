"""Plans as other commands take them: `--plan` of compare, bench, inspect and train."""

import json
import tomllib

import pytest
import torch
from typer.testing import CliRunner

import subquad as sq
from subquad.hf.plans import joined
from subquad.research.training.models import MaskedSymbolEncoder
from subquad.research.training.settings import read_overrides, settings_of
from subquad.tools.cli.main import app
from subquad.tools.models.pretrained import load
from tests.research.training import small as training

pytestmark = pytest.mark.slow  # whole runs of a plan

run = CliRunner().invoke
FOUND = {"floor": 0.9, "fidelity": 0.95, "bound": 0.93, "confidence": 0.95, "passages": 8, "speedup": 1.4}


def line(done):
    return " ".join(done.stderr.split())


def saved(folder, of, layers, bounds=None):
    verified = {"64": FOUND}
    plan = sq.Plan(sq.hf.adapters.describe_model(of), (64,), layers, verified, {"command": "here"}, bounds or {})
    return plan.save(folder, of)


@pytest.fixture
def plan(model, tmp_path):
    """Layer 0: exact, then a hash, then a window; layer 1: exact attention but for short inputs."""
    pretrained = load(model("bert")).model
    layers = sq.hf.find_layers(pretrained)
    bound = sq.hf.bind(layers[0], "lha:buckets=4,hidden=4")
    torch.nn.init.normal_(bound.learned.query.weights[0], std=5.0, generator=torch.Generator().manual_seed(0))
    method, together = joined(layers[0], {0: sq.Full(), 9: bound, 200: sq.Local(window=7)})
    last = sq.ByLength({0: "local:window=5", 40: "full"})
    return saved(tmp_path / "my-plan", pretrained, {0: method, 1: last}, {0: together})


@pytest.fixture
def exact(model, tmp_path):
    return saved(tmp_path / "exact", load(model("bert")).model, {0: sq.Full(), 1: sq.Full()})


# ---------------------------------------------------------------------- compare


@pytest.mark.usefixtures("short")
def test_compare_has_a_row_of_the_plan(plan, model, text, tmp_path):
    words = ["compare", model("bert"), "--text", str(text), "--methods", "local:window=7", "--plan", str(plan)]
    done = run(app, [*words, "--layers", "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    row = report["methods"][-1]
    assert row["method"] == "plan:my-plan"
    assert row["quality"].keys() == {"64", "96"}
    assert row["quality"]["64"]["layer_error"]["0"] > 0.01
    assert row["quality"]["64"]["layer_error"]["1"] == pytest.approx(0, abs=1e-6)
    assert any("lha:buckets=4" in note and "my-plan" in note for note in report["notes"])


# ---------------------------------------------------------------------- bench


def benched(*words, folder):
    given = ["--lengths", "16,32", "--passes", "forward", "--quick", "--json", "--out", str(folder)]
    return run(app, ["bench", *map(str, words), *given])


def test_bench_measures_the_methods_of_the_plan_in_its_shape(plan, tmp_path):
    report = json.loads(benched("--plan", plan, folder=tmp_path / "out").stdout)
    names = list(dict.fromkeys(cell["method"] for cell in report["cells"]))
    assert names == ["full", "lha:buckets=4,hidden=4", "local:window=7", "local:window=5"]
    assert (report["settings"]["heads"], report["settings"]["head_dim"]) == (4, 8)
    assert "--heads 4 --head-dim 8" in report["command"]
    assert "plans" not in report["settings"]


def test_bench_takes_what_is_given_beside_the_plan(plan, tmp_path):
    done = benched("--plan", plan, "--methods", "clustered:clusters=4", "--heads", "2", folder=tmp_path / "out")
    report = json.loads(done.stdout)
    assert {cell["method"] for cell in report["cells"]} >= {"full", "clustered:clusters=4", "local:window=5"}
    assert (report["settings"]["heads"], report["settings"]["head_dim"]) == (2, 8)


def test_bench_of_plans_that_say_no_shape_or_nothing(plan, exact, tmp_path):
    content = json.loads((plan / "plan.json").read_text())
    content["model"]["layers"][1] = [2, 2, 16]
    (plan / "plan.json").write_text(json.dumps(content))
    done = benched("--plan", plan, folder=tmp_path / "out")
    assert done.exit_code == 2
    assert "warning: " in done.stderr
    assert "was edited since it was written" in done.stderr
    assert "2 heads of width 16 and 4 heads of width 8: choose with --heads and --head-dim" in line(done)
    done = benched("--plan", exact, folder=tmp_path / "out")
    assert (done.exit_code, "exact attention in every layer: there is nothing to measure" in line(done)) == (2, True)
    done = benched("--plan", tmp_path / "nowhere", folder=tmp_path / "out")
    assert (done.exit_code, "no plan at" in line(done)) == (2, True)


# ---------------------------------------------------------------------- inspect


def inspected(*words, model, text, folder):
    given = ["--text", str(text), "--sequences", "1", "--tokens", "8", "--out", str(folder), "--json"]
    return run(app, ["inspect", model("bert"), *map(str, words), *given])


def test_inspect_looks_at_what_the_plan_runs_at_that_length(plan, model, text, tmp_path):
    done = inspected("--plan", plan, "--methods", "lsh:buckets=4", model=model, text=text, folder=tmp_path / "out")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    row = report["methods"][-1]
    assert row["method"] == "plan:my-plan"
    assert row["settings"]["name"] == "lha"
    assert "utility" in row["layers"]["0"]
    assert row["layers"]["1"]["reason"] == "the plan runs exact attention there at 64 tokens"
    assert any("layer (0: lha:buckets=4,hidden=4, 1: full)" in note for note in report["notes"])
    short = inspected("--plan", plan, "--length", "32", model=model, text=text, folder=tmp_path / "short")
    layers = json.loads(short.stdout)["methods"][-1]["layers"]
    assert "reason" not in layers["1"]


def test_inspect_reads_the_plan_s_own_parameters(plan, model, text, tmp_path):
    pretrained = load(model("bert")).model
    start = {0: sq.hf.bind(sq.hf.find_layers(pretrained)[0], "lha:buckets=4,hidden=4")}
    other = saved(tmp_path / "other", pretrained, {0: start[0].method, 1: sq.Full()}, start)
    given = ["--plan", plan, "--plan", other, "--methods", "lha:buckets=4,hidden=4"]
    done = inspected(*given, model=model, text=text, folder=tmp_path / "out")
    first, mine, its = (of["layers"]["0"] for of in json.loads(done.stdout)["methods"])
    assert its == first
    assert mine != first


def test_inspect_of_a_plan_that_is_exact_says_so(exact, model, text, tmp_path):
    done = inspected("--plan", exact, model=model, text=text, folder=tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert {layer["reason"] for layer in json.loads(done.stdout)["methods"][-1]["layers"].values()} == {
        "the plan runs exact attention there at 64 tokens"
    }


# ---------------------------------------------------------------------- train


SIZES = (*training.SIZES, *training.QUICK, "model.layers=2", "training.steps=2", "training.batch=4")


def trained(plan, folder, *words):
    sizes = [word for size in SIZES for word in ("--set", size)]
    return run(app, ["train", "masked-copy", *sizes, "--plan", str(plan), "--out", str(folder), *words])


@pytest.fixture
def small(tmp_path):
    """A plan for the model that SIZES make."""
    settings = settings_of("masked-copy", read_overrides(SIZES))
    model = settings.task.model(settings.model)
    layers = {0: sq.ByLength({0: "full", 8: "local:window=3"}), 1: sq.Local(window=5)}
    return saved(tmp_path / "small", model, layers)


def test_train_runs_the_plan_s_method_in_each_layer(small, tmp_path):
    done = trained(small, tmp_path / "run")
    assert done.exit_code == 0, done.output
    methods = tomllib.loads((tmp_path / "run" / "settings.toml").read_text())["model"]["method"]
    assert methods == ["by-length:steps=0:full+8:local:window=3", "local:window=5"]
    refused = run(app, ["plan", str(tmp_path / "run" / "model"), "--out", str(tmp_path / "plan")])
    assert "is a model of subquad train, which has no tokenizer to read text with" in line(refused)
    model = MaskedSymbolEncoder.from_pretrained(tmp_path / "run" / "model")
    assert list(map(str, sq.hf.describe(model).methods.values())) == methods
    again = trained(small, tmp_path / "run")
    assert (again.exit_code, "contains this run, finished" in again.stderr) == (0, True)


@pytest.mark.parametrize(("words", "message"), [
    (["--set", "model.layers=3"], "the model that is to be trained has 3 attention layers of"),
    (["--set", "model.heads=1"], "the model that is to be trained has"),
    (["--method", "local"], "model.method and model.plan both set what runs in the layers; give one of them"),
])  # fmt: skip
def test_a_plan_for_another_model_is_refused_in_one_line(words, message, small, tmp_path):
    done = trained(small, tmp_path / "run", *words)
    assert done.exit_code == 2, done.output
    assert message in line(done)
    assert not (tmp_path / "run" / "settings.toml").exists()


def test_the_method_of_a_later_source_takes_the_plan_s_place(small, tmp_path):
    done = trained(small, tmp_path / "run", "--set", "model.method=local:window=4")
    assert done.exit_code == 0, done.output
    assert tomllib.loads((tmp_path / "run" / "settings.toml").read_text())["model"]["method"] == "local:window=4"
    assert "no plan at nowhere" in line(trained("nowhere", tmp_path / "other"))
