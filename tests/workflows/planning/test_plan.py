"""A whole run: what is chosen is verified, shrinks where the verification fails, resumes, and is read again."""

import json
import warnings

import pytest
import torch
from typer.testing import CliRunner

import subquad as sq
from subquad.cli import app
from subquad.hf.plans import joined
from subquad.workflows.planning import length as planning
from subquad.workflows.planning import loads, measure
from subquad.workflows.planning import run as running
from tests.workflows.planning.test_measure import inputs, sharp

run = CliRunner().invoke
METHODS = ["local:window=12", "local:window=2", "clustered:clusters=8"]
SPEED = {"full": 1.0, "local:window=12": 0.6, "local:window=2": 0.2, "clustered:clusters=8": 0.4}


@pytest.fixture
def timed(monkeypatch):
    """Times that do not depend on the machine: of layers by the method, of passes always the same gain."""
    monkeypatch.setattr(measure, "_times", lambda at, methods: {"full": 1.0} | {n: SPEED.get(n, 0.5) for n in methods})
    monkeypatch.setattr(measure, "stopwatch", lambda call: (1.0, call()))
    turn = measure.turn

    def faster(*args, **options):
        found = turn(*args, **options)
        found.seconds |= {"full": 1.0} | {n: 0.5 for n in found.seconds if n != "full"}
        return found

    monkeypatch.setattr(planning, "turn", faster)

    def from_eight_tokens(at, methods, lengths):
        return {name: [n >= 8 for n in lengths] for name in methods}

    monkeypatch.setattr(planning, "faster_at", from_eight_tokens)
    monkeypatch.setattr(planning, "FASTER", 1.0)


def losses_of(plan, model, items):
    out = []
    for item in items:
        exact = running.input_loads(model, [item] * 5, None, None)[0]
        before = exact.run(item)
        sq.hf.swap(model, plan)
        out.append(exact.loss(exact.run(item), before))
        sq.hf.restore(model)
    return out


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("floor", [0.5, 0.9, 0.99])
def test_a_plan_keeps_its_floor_on_inputs_that_it_was_not_made_from(floor):
    model, items = sharp("bert"), inputs(18)
    plan = sq.plan(model, items, min_fidelity=floor, methods=METHODS)
    found = plan.verified["20"]
    assert found["bound"] >= floor or plan.layers == {0: sq.Full(), 1: sq.Full()}
    fresh = losses_of(plan, model, inputs(40)[20:])
    assert sum(fresh) / len(fresh) <= 1.3 * (1 - floor)
    assert not sq.hf.bounds(model)  # the model is as it was


@pytest.mark.usefixtures("timed")
def test_a_lower_floor_takes_less_time():
    model, items = sharp("bert"), inputs(18)
    seconds = []
    for floor in (0.3, 0.999, 0.999999):
        plan = sq.plan(model, items, min_fidelity=floor, methods=METHODS)
        at_twenty = [m.method_at(20) if isinstance(m, sq.ByLength) else m for m in plan.layers.values()]
        seconds.append(sum(SPEED[str(method)] for method in at_twenty))
    assert seconds[0] < seconds[1] <= seconds[2] == 2.0


@pytest.mark.usefixtures("timed")
def test_a_shift_leaves_room_for_other_inputs():
    model, items = sharp("bert"), inputs(18)
    losses = []
    for shift in (1.0, 1.6, 50.0):
        found = sq.plan(model, items, min_fidelity=0.7, shift=shift, methods=METHODS).verified["20"]
        losses.append(1 - found["bound"])
        assert losses[-1] <= 0.3 / shift
        assert found["shift"] == shift
    assert losses[0] > losses[2]


@pytest.mark.usefixtures("timed")
def test_what_fails_its_verification_becomes_more_exact_and_never_stays(monkeypatch):
    model, items = sharp("bert"), inputs(18)
    seen = []
    turn = planning.turn

    def worse(load, item, choices, seed):
        found = turn(load, item, choices, seed=seed)
        seen.append(choices["plan"])
        found.losses |= {name: 10.0 + 0.1 * seed for name in found.losses if name != "full"}
        return found

    monkeypatch.setattr(planning, "turn", worse)
    plan = sq.plan(model, items, min_fidelity=0.5, methods=METHODS)
    assert plan.layers == {0: sq.Full(), 1: sq.Full()}
    assert "on held-out passages" in plan.verified["20"]["exact_because"]
    rounds = seen[:: len(items) * 2 // 3]
    assert 1 < len(rounds) <= 4
    times = [sum(SPEED[str(m)] for m in each.values()) for each in rounds]
    assert times == sorted(times)


@pytest.mark.usefixtures("timed")
def test_an_interrupted_run_goes_on_and_ends_alike(tmp_path, monkeypatch):
    model, items = sharp("bert"), inputs(18)
    whole = sq.plan(model, items, min_fidelity=0.8, methods=METHODS)
    single, calls = planning.single_losses, []

    def cut(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return single(*args)

    monkeypatch.setattr(planning, "single_losses", cut)
    with pytest.raises(KeyboardInterrupt):
        sq.plan(model, items, min_fidelity=0.8, methods=METHODS, out=tmp_path)
    assert not sq.hf.bounds(model)
    again = sq.plan(model, items, min_fidelity=0.8, methods=METHODS, out=tmp_path)
    assert len(calls) == 3 + 4  # the first two units were kept
    assert again.layers == whole.layers
    assert again.made_on["resumed"] >= 3
    assert sq.load_plan(tmp_path) == again
    assert not (tmp_path / ".progress").exists()


@pytest.mark.usefixtures("timed")
def test_several_lengths_are_one_method_by_length():
    model = sharp("bert")
    plan = sq.plan(model, [*inputs(12), *inputs(12, 40)], min_fidelity=0.3, methods=METHODS)
    assert plan.lengths == (20, 40)
    method = plan.layers[1]
    assert isinstance(method, sq.ByLength)
    assert method.at[0] == (0, sq.Full())
    assert 5 <= method.at[1].start <= 20  # the crossover below the first length
    assert str(plan).startswith("layer 0: ")
    assert "40 tokens: fidelity" in str(plan)


@pytest.mark.usefixtures("timed")
def test_audits_start_from_what_the_plan_had_when_it_was_made():
    model = sharp("bert")
    plan = sq.plan(model, inputs(18), min_fidelity=0.3, methods=["local:window=2"])
    sq.hf.swap(model, plan)
    with sq.audit(model, tolerance=5.0, every=1, baseline=plan.baseline(20)) as audit, torch.no_grad():
        for item in inputs(18):
            model(**item)
    assert not any(layer.drifted for layer in audit.report().layers)
    with sq.audit(model, tolerance=5.0, every=1, baseline=plan.baseline(20)) as audit, torch.no_grad():
        for item in inputs(120):
            model(input_ids=0 * item["input_ids"] + 7)  # one token again and again: hardly an error
    assert any(layer.drifted for layer in audit.report().layers)
    held = torch.nn.ModuleDict({"inside": model})
    with sq.audit(held, tolerance=5.0, baseline=plan.baseline(20)) as audit:
        assert [layer.name for layer in audit.report().layers] == list(plan.baseline(20)["layers"])
    with pytest.raises(ValueError, match="no baseline for 99 tokens; it has 20"):
        plan.baseline(99)


@pytest.mark.usefixtures("timed")
def test_a_metric_and_a_loss_of_the_users():
    model, items = sharp("bert"), inputs(18)

    def first_positive(output, item):
        return float(output.last_hidden_state[0, 0, 0] > 0)

    plan = sq.plan(model, items, min_fidelity=0.5, metric=first_positive, methods=["local:window=2"])
    assert all("local" in str(method) for method in plan.layers.values())
    none = sq.plan(model, items, min_fidelity=0.99, loss=lambda a, b: 1.0, methods=["local:window=2"])
    assert set(none.layers.values()) == {sq.Full()}
    assert none.verified["20"]["exact_because"] == "no method in any layer keeps the floor"


@pytest.mark.usefixtures("timed")
def test_a_causal_model_is_planned_with_causal_methods():
    model = sharp("llama")
    plan = sq.plan(model, inputs(12), min_fidelity=0.2, methods=["clustered:clusters=8", "local:window=12"])
    assert {m.name for m in plan.layers.values()} <= {"full", "local", "by-length"}
    assert sq.hf.swap(model, plan).methods == plan.layers


# ---------------------------------------------------------------------- the file


def made(model):
    layers = {0: sq.ByLength({0: "full", 9: "local:window=2"}), 1: sq.Full()}
    found = {"floor": 0.9, "fidelity": 0.95, "bound": 0.93, "confidence": 0.95, "passages": 8, "speedup": 1.4}
    return sq.Plan(sq.hf.adapters.describe_model(model), (20,), layers, {"20": found}, {"command": "here"})


def test_a_plan_is_saved_read_swapped_in_and_kept_by_the_model(tmp_path):
    model = sharp("bert")
    plan = made(model)
    plan.save(tmp_path / "plan", model)
    again = sq.load_plan(tmp_path / "plan")
    assert again == plan
    assert sq.load_plan(tmp_path / "plan" / "plan.json") == plan
    assert sq.hf.swap(model, again).methods == plan.layers
    out = model(**inputs()[0]).last_hidden_state
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model")
    assert sq.hf.describe(loaded).methods == plan.layers
    torch.testing.assert_close(loaded.eval()(**inputs()[0]).last_hidden_state, out)


def test_learned_parameters_travel_with_the_plan(tmp_path):
    model = sharp("bert")
    layers = sq.hf.find_layers(model)
    first = sq.hf.bind(layers[0], "lha:buckets=3,hidden=8")
    alone = sq.hf.bind(layers[1], "lha:buckets=2,hidden=4")
    for parameter in [*first.parameters(), *alone.parameters()]:
        parameter.data.normal_()
    methods, bounds = {}, {}
    methods[0], bounds[0] = joined(layers[0], {0: sq.Full(), 9: first})
    methods[1], bounds[1] = joined(layers[1], {0: alone, 9: alone})
    assert methods[1] == alone.method
    plan = sq.Plan(sq.hf.adapters.describe_model(model), (20,), methods, {}, {}, bounds)
    sq.hf.swap(model, plan)
    out = model(**inputs()[0]).last_hidden_state
    sq.hf.restore(model)
    plan.save(tmp_path, model)
    sq.hf.swap(model, sq.load_plan(tmp_path))
    torch.testing.assert_close(model(**inputs()[0]).last_hidden_state, out)
    assert joined(layers[0], {0: sq.Full()}) == (sq.Full(), None)


def edited(folder, **changes):
    content = json.loads((folder / "plan.json").read_text())
    for name, value in changes.items():
        content[name] = value
    (folder / "plan.json").write_text(json.dumps(content))
    return folder


def test_a_plan_that_was_edited_says_so_and_works(tmp_path):
    plan = made(sharp("bert"))
    plan.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sq.load_plan(tmp_path)
    layers = {"0": {"name": "local", "window": 7}, "1": {"name": "full"}}
    with pytest.warns(UserWarning, match=r"plan.json was edited since it was written"):
        again = sq.load_plan(edited(tmp_path, layers=layers))
    assert again.layers[0] == sq.Local(window=7)


@pytest.mark.filterwarnings("ignore:.*was edited since")
@pytest.mark.parametrize(("changes", "message"), [
    ({"layers": {"0": {"name": "lokal"}}}, "layer 0: no method 'lokal'; did you mean 'local'"),
    ({"layers": {"0": {"name": "local", "wide": 3}}}, "layer 0: 'local' has no setting 'wide'"),
    ({"layers": {"0": {"name": "local", "window": -3}}}, "layer 0: 'local': window=-3, but it must be"),
    ({"layers": {"7": {"name": "full"}}}, "a method for layer '7', but the model has 2"),
    ({"layers": {"0": 3}}, "the method of layer 0 is '3'"),
    ({"layers": []}, "its 'layers' is '[]'"),
    ({"format": 9}, "has format 9, but this version reads 1"),
    ({"lengths": [-3]}, "its lengths are [-3]"),
    ({"model": {}}, "it does not say what model it is for"),
])  # fmt: skip
def test_plans_that_are_none_are_refused_in_one_line(changes, message, tmp_path):
    made(sharp("bert")).save(tmp_path)
    with pytest.raises(ValueError, match=r"plan\.json") as error:
        sq.load_plan(edited(tmp_path, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_no_plan_and_no_json(tmp_path):
    with pytest.raises(ValueError, match=r"no plan at .*there is no such folder"):
        sq.load_plan(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no plan at .*it has no plan.json"):
        sq.load_plan(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged: it is not JSON"):
        sq.load_plan(tmp_path)


def test_a_plan_for_another_model_is_refused_and_the_model_is_as_it_was():
    plan, model = made(sharp("bert")), sharp("llama")
    sq.hf.swap(model, "local")
    with pytest.raises(ValueError, match=r"made for a BertModel with 2 attention layers .* but this is a Llama"):
        sq.hf.swap(model, plan)
    assert sq.hf.describe(model).methods[0] == sq.Local()


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize(("options", "message"), [
    (["--min-fidelity", "0"], "min-fidelity 0 must be above 0 and at most 1"),
    (["--min-fidelity", "1.5"], "min-fidelity 1.5 must be above 0 and at most 1"),
    (["--shift", "0.5"], "shift 0.5 must be at least 1"),
    (["--minutes", "0"], "minutes 0 must be at least 0.1"),
    (["--lengths", "8"], "a length of 8 is too short to plan for"),
    (["--lengths", "many"], "length 'many' is no whole number"),
    (["--lengths", "100000"], "less than five passages of 100,000"),
    (["--methods", "lokal"], "no method 'lokal'; did you mean 'local'"),
    (["--adapter", "nowhere"], "no adapter at nowhere"),
])  # fmt: skip
def test_bad_input_is_one_line(options, message, model, text, tmp_path):
    done = run(app, ["plan", model("bert"), "--text", str(text), "--out", str(tmp_path), *options])
    assert done.exit_code == 2, done.output
    said = " ".join(done.stderr.split())
    assert message in said
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(("name", "floor"), [("bert", "0.2"), ("gpt2", "0.999"), ("masked", "0.9")])
def test_the_command_writes_a_plan_and_its_report(name, floor, model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(loads, "MOST", 3)
    words = ["plan", model(name), "--text", str(text), "--lengths", "32,64", "--min-fidelity", floor]
    done = run(app, [*words, "--methods", "local:window=2 clustered:clusters=8", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [p["length"] for p in report["lengths"]] == [32, 64]
    assert report["kind"] == "plan"
    for length in report["lengths"]:
        assert "verified" in length or length["exact_because"]
        if "verified" in length:
            assert length["verified"]["bound"] <= 1 - float(floor)
    plan = sq.load_plan(tmp_path)
    assert plan.lengths == (32, 64)
    assert {p.name for p in tmp_path.iterdir()} >= {"plan.json", "report.html", "report.md", "report.json"}
    page = (tmp_path / "report.md").read_text()
    assert report["headline"].split(":")[0] in page
    said = run(app, [*words, "--methods", "local:window=2", "--out", str(tmp_path)])
    assert said.exit_code == 0, said.output
    assert "plan.json" in said.stdout
