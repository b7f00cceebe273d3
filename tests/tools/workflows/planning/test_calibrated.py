"""`subquad plan --calibrate`: methods with learned parameters are fitted first, and travel with the plan."""

import json

import pytest
import torch
from typer.testing import CliRunner

import subquad as sq
from subquad.tools.calibrate import run as fitting
from subquad.tools.cli.main import app
from subquad.tools.measure.deadline import Deadline
from subquad.tools.models.pretrained import load
from subquad.tools.plan import loads
from subquad.tools.plan import run as running
from subquad.tools.plan.planning import Planning, candidates_for, plan_of
from subquad.tools.runs.cache import run_cache
from subquad.tools.runs.floor import Floor
from tests.tools.workflows.planning.steady import make_steady
from tests.tools.workflows.planning.test_measure import inputs, sharp

pytestmark = pytest.mark.slow  # whole runs of a plan

run = CliRunner().invoke
LHA = "lha:buckets=3,hidden=8"


@pytest.fixture
def words(model, text, tmp_path, monkeypatch):
    make_steady(monkeypatch.setattr)
    monkeypatch.setattr(loads, "MOST", 3)
    monkeypatch.setattr(loads, "HELD_OUT", 4)

    def of(*more, name="bert", floor=("--min-fidelity", "0.05"), lengths="64"):
        given = ["--text", str(text), "--lengths", lengths, *floor, "--out", str(tmp_path / "plan")]
        return ["plan", model(name), *given, *map(str, more)]

    return of


def test_what_is_fitted_is_chosen_and_travels_with_the_plan(words, other_text, quick, model, tmp_path):
    done = run(app, [*words("--calibrate", other_text, "--methods", f"local:window=12 {LHA}"), "--json"])
    assert done.exit_code == 0, done.output
    assert quick == [LHA]
    report = json.loads(done.stdout)
    assert {of["method"] for of in report["lengths"][0]["layers"].values()} == {LHA}  # at 0.5, windows being at 0.6
    assert f"--calibrate {other_text}" in report["command"]
    plan = sq.load_plan(tmp_path / "plan")
    assert set(plan.learned) == {0, 1}
    adapter = sq.hf.read_adapter(tmp_path / "plan" / "adapters" / "lha-buckets-3-hidden-8")
    pretrained = load(model("bert"))
    bounds = sq.hf.swap(pretrained.model, plan) and sq.hf.bounds(pretrained.model)
    for number, fitted in adapter.bounds(pretrained.model).items():
        (mine,) = (part for part in bounds[number].learned.children())
        assert mine.state_dict().keys() == fitted.learned.state_dict().keys()
        for name, tensor in fitted.learned.state_dict().items():
            assert torch.equal(mine.state_dict()[name], tensor)


def test_an_interrupted_run_fits_once(words, other_text, quick, tmp_path, monkeypatch):
    plan_loads = running.plan_loads

    def cut(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "plan_loads", cut)
    asked = words("--calibrate", other_text, "--methods", LHA)
    assert run(app, asked).exit_code == 130
    monkeypatch.setattr(running, "plan_loads", plan_loads)
    assert run(app, asked).exit_code == 0
    assert quick == [LHA]
    assert sq.load_plan(tmp_path / "plan").learned


def test_a_text_that_was_changed_in_its_place_is_fitted_on_again(words, other_text, quick):
    asked = words("--calibrate", other_text, "--methods", LHA)
    assert run(app, asked).exit_code == 0
    assert run(app, asked).exit_code == 0
    assert quick == [LHA]
    first = other_text / "0.txt"
    first.write_text(first.read_text()[::-1])
    assert run(app, [*asked, "--again"]).exit_code == 0
    assert quick == [LHA, LHA]


def test_without_methods_those_of_compare_are_fitted_beside_the_grid(words, other_text, quick, tmp_path):
    done = run(app, [*words("--calibrate", other_text), "--json"])
    assert done.exit_code == 0, done.output
    notes = json.loads(done.stdout)["notes"]
    untried = {note.partition(" was not tried")[0] for note in notes if "was not tried" in note}
    assert set(quick) == {"lha:buckets=4", "lha-tail", "tilted-pool", "learned-feature-map", "linformer"}
    assert untried < set(quick)  # exact attention at 64 tokens
    tried = {path.name for path in (tmp_path / "plan" / "adapters").iterdir() if (path / "adapter.json").exists()}
    assert len(tried) == len(quick) - len(untried) > 1


def test_what_a_causal_model_cannot_run_is_named(words, other_text, quick):
    done = run(app, [*words("--calibrate", other_text, name="gpt2", floor=("--max-kl", "3")), "--json"])
    assert done.exit_code == 0, done.output
    notes = json.loads(done.stdout)["notes"]
    assert any(note.startswith("tilted-pool was not tried: ") and "causal" in note for note in notes)
    assert "learned-feature-map" in quick


@pytest.mark.parametrize(("options", "message"), [
    (["--methods", LHA], f"{LHA} has learned parameters, and a plan accepts only those that are fitted: --calibrate"),
    (["--methods", "local", "--calibrate", "{other}"], "none of the methods has learned parameters to fit"),
    (["--methods", LHA, "--calibrate", "{text}"], "contains the text of --text"),
    (["--methods", LHA, "--calibrate", "nowhere"], "nowhere"),
    (["--methods", "smyrf", "--model", "gpt2"], "no layer of the model can run smyrf: 'smyrf' is not causal"),
])  # fmt: skip
def test_bad_input_is_one_line(options, message, words, other_text, text, tmp_path):
    name = "bert"
    if "--model" in options:
        *options, _, name = options
    given = [option.format(other=other_text, text=text) for option in options]
    floor = ("--max-kl", "1") if name == "gpt2" else ("--min-fidelity", "0.05")
    done = run(app, words(*given, name=name, floor=floor))
    assert done.exit_code == 2, done.output
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "plan" / "plan.json").exists()


def test_an_adapter_stands_for_its_method(words, other_text, model, tmp_path):
    small = fitting.CalibrateSettings(method=LHA, text=(other_text,), model=model("bert"), steps=1, max_length=48)
    fitting.save(fitting.calibrate(small, tmp_path / "mine"), tmp_path / "mine")
    done = run(app, [*words("--adapter", tmp_path / "mine", "--methods", f"local:window=12 {LHA}"), "--json"])
    assert done.exit_code == 0, done.output
    assert {of["method"] for of in json.loads(done.stdout)["lengths"][0]["layers"].values()} == {"adapter:mine"}


def test_two_adapters_of_one_name_are_refused(words, other_text, model, tmp_path):
    small = fitting.CalibrateSettings(method=LHA, text=(other_text,), model=model("bert"), steps=1, max_length=48)
    for folder in (tmp_path / "a" / "mine", tmp_path / "b" / "mine"):
        fitting.save(fitting.calibrate(small, folder), folder)
    done = run(app, words("--adapter", tmp_path / "a" / "mine", "--adapter", tmp_path / "b" / "mine"))
    assert done.exit_code == 2
    assert "two of the adapters are called mine" in " ".join(done.stderr.split())


def test_parameters_for_shorter_inputs_are_no_candidate_and_exact_attention_follows_them(monkeypatch, tmp_path):
    make_steady(monkeypatch.setattr)
    model = sharp("bert")
    bounds = {layer.number: sq.hf.bind(layer, "linformer:k=5", 30) for layer in sq.hf.find_layers(model)}
    of = candidates_for(model, [], {"fitted": bounds})
    assert [[c.name for c in of(length)] for length in (20, 30, 31)] == [["fitted"], ["fitted"], []]
    given = loads.input_loads(model, inputs(12), None)
    planning = Planning(given, of, Floor("fidelity", 0.01), Deadline(60.0))
    planning.run(run_cache(tmp_path, {}), lambda what, done, total: None)
    for method in plan_of(planning, {}).layers.values():
        assert [step.start for step in method.at][-1] == 31
        assert method.method_at(31) == sq.Full()
        assert method.method_at(30).name == "linformer"
