"""A whole run: what is chosen is verified, shrinks where the verification fails, resumes, and is read again."""

import json
from math import exp

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from typer.testing import CliRunner

import subquad as sq
from subquad.core.errors import InputError
from subquad.tools.cli.main import app
from subquad.tools.measure.capture import recorded
from subquad.tools.plan import length as planning
from subquad.tools.plan import loads
from subquad.tools.plan import run as running
from subquad.tools.plan.measure import SingleLosses
from subquad.tools.runs.cache import JobCache, run_cache
from subquad.tools.runs.jobs import Job
from tests.tools.workflows import tiny
from tests.tools.workflows.planning.steady import SPEED, make_steady
from tests.tools.workflows.planning.test_measure import inputs, sharp

pytestmark = pytest.mark.slow  # whole runs of a plan

run = CliRunner().invoke
METHODS = ["local:window=12", "local:window=2", "clustered:clusters=8"]


@pytest.fixture
def timed(monkeypatch):
    """Times that do not depend on the machine: of layers by the method, of passes always the same gain."""
    make_steady(monkeypatch.setattr)


def losses_of(plan, model, items):
    out = []
    for item in items:
        exact = running.input_loads(model, [item] * 5, None)[0]
        before = exact.run(item)
        sq.hf.swap(model, plan)
        out.append(exact.loss(exact.run(item), before))
        sq.hf.restore(model)
    return out


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("floor", [0.9, *(pytest.param(f, marks=pytest.mark.long) for f in (0.5, 0.99))])
def test_a_plan_keeps_its_floor_on_inputs_that_it_was_not_made_from(floor):
    model, items = sharp("bert"), inputs(18)
    plan = sq.plan(model, items, min_fidelity=floor, methods=METHODS)
    found = plan.verified["20"]
    assert found["bound"] >= floor or plan.layers == {0: sq.Full(), 1: sq.Full()}
    fresh = losses_of(plan, model, inputs(40)[20:])
    assert sum(fresh) / len(fresh) <= 1.3 * (1 - floor)
    assert not sq.hf.bounds(model)  # the model is as it was


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("without", [0.02, 0.5])
def test_a_tenth_of_a_small_loss_without_attention_is_accepted_at_most(without, monkeypatch):
    held_out_pass = planning.held_out_pass

    def weak(load, item, choices, seed):
        found = held_out_pass(load, item, choices, seed=seed)
        found.losses |= dict.fromkeys(found.losses.keys() & {"without attention"}, without)
        return found

    monkeypatch.setattr(planning, "held_out_pass", weak)
    plan = sq.plan(sharp("bert"), inputs(18), min_fidelity=0.5, methods=METHODS)
    assert (plan.verified["20"].get("unproven", "").startswith("the fidelity without any attention is still")) == (
        without == 0.02
    )
    assert plan.verified["20"]["fidelity"] >= (0.998 if without == 0.02 else 0.5)


def test_a_text_that_shows_no_loss_leaves_exact_kernels_alone(unchecked):
    planned = planning.Planned(20, losses={0: {"clustered": [1e-6], "local": [2e-6], "full:kernel=subquad": [0.0]}})
    candidates = [
        planning.Candidate(name, {0: sq.methods.resolve(name)})
        for name in ("clustered", "local", "full:kernel=subquad")
    ]
    length = planning.Length(None, candidates, 0.99, 1.0, None, None, 1.0)
    length.tell_apart(planned)
    assert planned.losses == {0: {"full:kernel=subquad": [0.0]}}
    assert planned.unproven == "both approximations have the fidelity of exact attention, 1.0000"


@pytest.mark.long
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
    held_out_pass = planning.held_out_pass

    def worse(load, item, choices, seed):
        found = held_out_pass(load, item, choices, seed=seed)
        if "plan" not in choices:  # the loss without attention
            return found
        seen.append(choices["plan"])
        found.losses |= {name: 10.0 + 0.1 * seed for name in found.losses if name != "full"}
        return found

    monkeypatch.setattr(planning, "held_out_pass", worse)
    plan = sq.plan(model, items, min_fidelity=0.5, methods=METHODS)
    assert plan.layers == {0: sq.Full(), 1: sq.Full()}
    assert "on 12 held-out passages" in plan.verified["20"]["exact_because"]
    rounds = seen[:: len(items) * 2 // 3]
    assert 1 < len(rounds) <= 4
    times = [sum(SPEED[str(m)] for m in each.values()) for each in rounds]
    assert times == sorted(times)


def cut_after(monkeypatch, jobs):
    """Count the jobs whose results are kept, and interrupt the run before the next one after so many."""
    write, counted = JobCache._write, []

    def cut(self, *given):
        if len(counted) == jobs:
            raise KeyboardInterrupt
        counted.append(given[0])
        return write(self, *given)

    monkeypatch.setattr(JobCache, "_write", cut)
    return counted


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize("share", [0.1, 0.5, *(pytest.param(x, marks=pytest.mark.long) for x in (0.3, 0.7, 0.8, 0.95))])
def test_a_run_that_is_interrupted_at_any_job_goes_on_and_ends_alike(share, tmp_path, monkeypatch):
    asked = {"inputs": inputs(18), "min_fidelity": 0.8, "methods": METHODS}
    model = sharp("bert")
    with monkeypatch.context() as patch:
        jobs = cut_after(patch, None)
        whole = sq.plan(model, **asked, out=tmp_path / "whole")
    first = int(share * len(jobs))
    with monkeypatch.context() as patch:
        cut_after(patch, first)
        with pytest.raises(KeyboardInterrupt):
            sq.plan(model, **asked, out=tmp_path / "cut")
    assert not sq.hf.bounds(model)
    with monkeypatch.context() as patch:
        others = cut_after(patch, None)
        again = sq.plan(model, **asked, out=tmp_path / "cut")
    assert others == jobs[first:]  # nothing is measured twice
    assert again.layers == whole.layers
    assert again.verified == whole.verified
    assert again.made_on["resumed"] == first
    assert sq.load_plan(tmp_path / "cut") == again
    assert not (tmp_path / "cut" / ".progress").exists()


@pytest.mark.usefixtures("timed")
def test_more_minutes_take_over_nothing_of_an_earlier_choice(tmp_path, monkeypatch):
    """Of an interrupted run with other minutes, which chose other methods at the first length."""
    model, items = sharp("bert"), [*inputs(18), *inputs(18, 30)]
    asked = {"min_fidelity": 0.5, "methods": METHODS, "shift": 1.0}
    kept = []

    def cut(self, key, *args):
        kept.append(key)
        result = write(self, key, *args)
        if key.startswith("baseline/20"):
            raise KeyboardInterrupt
        return result

    write = JobCache._write
    with monkeypatch.context() as patch:  # both layers together, as with little time, and another floor's choice
        patch.setattr(planning, "affordable", lambda cost, seconds: planning.PlanEffort(2, 2, 1.0))
        patch.setattr(planning.choice, "closest", lambda *_: dict.fromkeys((0, 1), "local:window=12"))
        patch.setattr(JobCache, "_write", cut)
        with pytest.raises(KeyboardInterrupt):
            sq.plan(model, items, **asked, minutes=5.0, out=tmp_path)
    again = sq.plan(model, items, **asked, minutes=10.0, out=tmp_path)
    fresh = sq.plan(model, items, **asked, minutes=10.0)
    assert again.made_on["resumed"] == len(kept)
    assert again.layers == fresh.layers
    assert "local:window=12" not in [str(method.method_at(20)) for method in fresh.layers.values()]
    assert again.verified == fresh.verified  # with the baselines


@pytest.mark.usefixtures("timed")
def test_a_plan_is_of_the_hardware_that_the_model_is_on(monkeypatch):
    monkeypatch.setattr(running, "device_of", lambda model: torch.device("cuda", 1))
    asked = []
    monkeypatch.setattr(running.machine, "hardware", lambda device: asked.append(device) or {"gpu": "a GPU"})
    plan = sq.plan(sharp("bert"), inputs(12), min_fidelity=0.3, methods=["local:window=2"])
    assert set(asked) == {"cuda:1"}  # in the fingerprint of the run, and in what the plan was made on
    assert plan.made_on["hardware"] == {"gpu": "a GPU"}


@pytest.mark.usefixtures("timed")
def test_a_folder_of_another_run_loses_nothing(tmp_path):
    asked = {"inputs": inputs(12), "min_fidelity": 0.8, "methods": METHODS}
    begun = tmp_path / "begun"
    other = run_cache(begun, {"of": "another run"}).compute(Job("one", lambda progress: 3, record=int))
    sq.plan(sharp("bert"), **asked, out=begun)
    kept = run_cache(begun, {"of": "another run"})
    assert (kept.resumed, kept.read("one", int)) == (1, other)
    assert len(list(kept.folder.parent.glob("*/"))) == 1
    finished = tmp_path / "finished"
    finished.mkdir()
    (finished / "report.json").write_text("{}")
    with pytest.raises(ValueError, match="contains the report of a command"):
        sq.plan(sharp("bert"), **asked, out=finished)
    assert [path.name for path in finished.iterdir()] == ["report.json"]


@pytest.mark.usefixtures("timed")
def test_every_loss_of_a_single_layer_is_a_job_of_its_own(tmp_path, monkeypatch):
    jobs = cut_after(monkeypatch, None)
    sq.plan(sharp("bert"), inputs(12), min_fidelity=0.8, methods=METHODS, out=tmp_path)
    losses = [key.split("/")[2:] for key in jobs if key.startswith("loss/")]
    assert {layers for _, layers, _ in losses} == {"0", "1"}
    assert {candidate for _, _, candidate in losses} <= set(METHODS)
    assert [item for item, _, _ in losses] == sorted(item for item, _, _ in losses)
    assert len(losses) == len({tuple(each) for each in losses})


def near(output, exact):
    return 1 - 0.001 * float((output.last_hidden_state - exact.last_hidden_state).abs().mean())


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(("changed", "resumes"), [
    ({}, True),
    ({"inputs": [{"input_ids": item["input_ids"].roll(1)} for item in inputs(12)]}, False),
    ({"metric": lambda output, exact: 0.998 + 0.002 * near(output, exact)}, False),
    ({"metric": "relative-error"}, False),
    pytest.param({"metric": None, "score": lambda output, item: 1.0}, False, marks=pytest.mark.long),
    pytest.param({"min_fidelity": 0.5}, False, marks=pytest.mark.long),
])  # fmt: skip
def test_a_run_resumes_only_with_the_same_inputs_and_the_same_metric(changed, resumes, tmp_path, monkeypatch):
    model, asked = sharp("bert"), {"inputs": inputs(12), "metric": near, "min_fidelity": 0.3, "methods": METHODS}
    held_out_pass = planning.held_out_pass

    def cut(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "held_out_pass", cut)
    with pytest.raises(KeyboardInterrupt):
        sq.plan(model, **asked, out=tmp_path)
    monkeypatch.setattr(planning, "held_out_pass", held_out_pass)
    again = sq.plan(model, **asked | changed, out=tmp_path)
    assert (again.made_on["resumed"] > 0) == resumes
    whole = sq.plan(model, **asked | changed)
    assert (again.layers, again.verified) == (whole.layers, whole.verified)


@pytest.mark.usefixtures("timed")
def test_inputs_may_be_made_one_by_one():
    model = sharp("bert")
    wanted = sq.plan(model, inputs(12), min_fidelity=0.3, methods=METHODS)
    assert sq.plan(model, iter(inputs(12)), min_fidelity=0.3, methods=METHODS) == wanted


@pytest.mark.usefixtures("timed")
def test_methods_of_several_seeds_are_taken_for_one_length_and_refused_for_two():
    model, methods = sharp("bert"), ["clustered:clusters=8,seed=1", "clustered:clusters=4,seed=2"]
    assert sq.plan(model, inputs(12), min_fidelity=0.1, methods=methods).distinct
    with pytest.raises(ValueError, match="several lengths run in one layer, where the parts have the seeds 1 and 2"):
        sq.plan(model, inputs(6) + inputs(6, length=30), min_fidelity=0.1, methods=methods)


def test_lengths_are_refused_for_inputs_other_than_texts():
    with pytest.raises(ValueError, match=r"lengths=\(16, 24\) are of passages .*, but the inputs are not texts"):
        sq.plan(sharp("bert"), inputs(12), lengths=[24, 16])


def sentences(folder):
    """A SentenceTransformer with 64 rotary positions."""
    inside = Transformer(str(tiny.save("modernbert", folder)))
    return SentenceTransformer(modules=[inside, Pooling(inside.get_embedding_dimension())], device="cpu")


@pytest.mark.usefixtures("timed")
def test_rotary_positions_are_extended_by_the_user_alone(tmp_path):
    model, texts = sentences(tmp_path), tiny.documents(30, 60)
    asked = {"min_fidelity": 0.3, "methods": ["clustered:clusters=8"], "minutes": 1.0}
    with pytest.raises(
        ValueError, match=r"^lengths: 128 is past the 64 positions of the model; sq\.hf\.extend_positions"
    ):
        sq.plan(model, texts, lengths=[64, 128], **asked)
    assert sq.plan(model, texts, **asked).lengths == (64,)  # of 512, 2,048 and 4,096
    sq.hf.extend_positions(model, 128)
    assert sq.plan(model, texts, lengths=[128], **asked).lengths == (128,)


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
    with pytest.raises(ValueError, match="no baseline for 99 tokens; it has one for 20"):
        plan.baseline(99)


@pytest.mark.usefixtures("timed")
def test_an_audit_of_a_planned_model_speaks_the_units_of_its_floor(tmp_path, caplog):
    model = sharp("bert")
    plan = sq.plan(model, inputs(18), min_fidelity=0.97, methods=METHODS, out=tmp_path)
    assert plan.floor == {"min_fidelity": 0.97, "pooling": "mean"}
    assert sq.load_plan(tmp_path).floor == plan.floor

    def reports(items):
        with sq.audit(model, every=1) as audit, torch.no_grad():
            for item in items:
                model(**item)
        return audit.report()

    sq.hf.swap(model, plan)
    healthy = reports(inputs(60)[20:])  # not those that it was planned on
    assert healthy.alarm is False
    assert healthy.overall.largest > 0.5  # a tolerance of rows would have raised an alarm
    assert not caplog.records
    for name, parameter in model.named_parameters():
        if "query" in name:
            parameter.data.mul_(20.0)  # far sharper attention than the plan was verified for
    broken = reports(inputs(120))
    assert broken.alarm is True
    assert broken.embeddings.fidelity < 0.97
    assert [record.message for record in caplog.records if "embeddings have a mean cosine of" in record.message]
    own = sq.plan(model, inputs(12), min_fidelity=0.01, metric=near, methods=METHODS)
    assert own.floor is None  # an audit does not know the metric
    exact = sq.plan(sharp("bert"), inputs(12), min_fidelity=0.999999, methods=["local:window=2"])
    assert exact.floor == {"min_fidelity": 0.999999, "pooling": "mean"}  # also of exact attention, which keeps it


@pytest.mark.usefixtures("timed")
def test_a_score_and_a_metric():
    model, items = sharp("bert"), inputs(24)

    def first_positive(output, item):
        return float(output.last_hidden_state[0, 0, 0] > 0)

    plan = sq.plan(model, items, min_fidelity=0.5, score=first_positive, methods=["local:window=2"])
    assert all("local" in str(method) for method in plan.layers.values())
    none = sq.plan(model, items, min_fidelity=0.99, metric=lambda a, b: float(a is b), methods=["local:window=2"])
    assert set(none.layers.values()) == {sq.Full()}
    assert none.verified["20"]["exact_because"] == "no method in any layer keeps the floor"


@pytest.mark.usefixtures("timed")
def test_a_kernel_without_any_loss_keeps_an_agreement(model, text, tmp_path):
    words = ["plan", model("llama"), "--text", str(text), "--lengths", "64", "--methods", "full:kernel=subquad"]
    done = run(app, [*words, "--min-agreement", "0.99", "--new-tokens", "0", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    (length,) = json.loads(done.stdout)["lengths"]
    assert length["verified"]["bound"] == length["verified"]["loss"] == 0
    assert len(length["rounds"]) == 1


@pytest.mark.usefixtures("timed")
def test_only_the_user_s_own_metric_may_be_right_or_wrong():
    def binary(**judged):
        settings = {"metric": None, "score": None, "floor": 0.5} | judged
        judge = running.judge_for(inputs(), **settings)
        return running.input_loads(sharp("bert"), inputs(), judge)[0].may_be_binary

    assert [binary(), binary(metric="cosine")] == [False, False]
    assert [binary(metric=near), binary(score=lambda output, item: 1.0)] == [True, True]


@pytest.mark.usefixtures("timed")
def test_an_accuracy_needs_inputs_enough_for_its_bound():
    model = sharp("bert")
    found = {}
    for count in (12, 60):  # 8 and 44 held out
        plan = sq.plan(
            model, inputs(count), min_fidelity=0.8, shift=1.0, score=lambda *_: 1.0, methods=["local:window=2"]
        )
        found[count] = plan.verified["20"]
    assert found[12]["speedup"] == 1.0
    assert "has a loss of 0.0000 (at most 0.4" in found[12]["exact_because"]
    assert found[60]["bound"] == pytest.approx(0.01 ** (1 / 44))


@pytest.mark.usefixtures("timed")
def test_a_metric_is_given_what_the_model_gives():
    seen = []

    def metric(output, exact):
        seen.append((type(output).__name__, type(exact).__name__))
        return 1 - (output.last_hidden_state - exact.last_hidden_state).abs().mean()

    plan = sq.plan(sharp("bert"), inputs(12), min_fidelity=0.01, shift=1.0, metric=metric, methods=["local:window=12"])
    assert set(seen) == {("BaseModelOutputWithPoolingAndCrossAttentions",) * 2}
    assert 0 < plan.verified["20"]["loss"] < 1


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(("what", "message"), [
    ("metric", r"metric <lambda> is {} for an exact output compared with itself, but a plan needs a metric that is 1"),
    ("score", "an output of exact attention compared with itself has a loss of nan, but it must be"),
])  # fmt: skip
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_figures_that_are_not_finite_are_named(what, message, value):
    model = sharp("bert")
    with pytest.raises(ValueError, match=message.format(value)):
        sq.plan(model, inputs(12), methods=METHODS, **{what: lambda output, other: value})
    assert not sq.hf.bounds(model)


@pytest.mark.usefixtures("timed")
def test_a_method_whose_loss_or_error_is_not_finite_is_never_taken(monkeypatch):
    model, items = sharp("bert"), inputs(18)
    assert "local:window=2" in str(sq.plan(model, items, min_fidelity=0.3, methods=METHODS))
    single = SingleLosses.loss

    def broken(self, item, methods):
        return float("nan") if sq.Local(window=2) in methods.values() else single(self, item, methods)

    with monkeypatch.context() as patch:
        patch.setattr(SingleLosses, "loss", broken)
        assert "local:window=2" not in str(sq.plan(model, items, min_fidelity=0.3, methods=METHODS))
    screened = planning.screen

    def strange(*arguments):
        found = screened(*arguments)
        for errors in found.errors.values():
            errors["local:window=2"] = float("nan")
        return found

    monkeypatch.setattr(planning, "screen", strange)
    near = sq.plan(model, items, min_fidelity=0.3, methods=METHODS)
    assert "clustered" in str(near)
    assert "local:window=2" not in str(near)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"methods": []}, "the methods name none but exact attention"),
    ({"methods": "full"}, "the methods name none but exact attention"),
    ({"methods": ["lha"]}, "lha has learned parameters, and sq.plan .*; leave it out of methods$"),
    ({"inputs": inputs(1)[0]}, "inputs are a list of mappings or of texts, got one dict"),
    ({"inputs": "a text"}, "inputs are a list of mappings or of texts, got one str"),
    ({"methods": ["local", "by-length"]}, "by-length is a mixture, but a plan joins its methods by length"),
    ({"min_fidelity": float("nan")}, "min-fidelity nan must be above 0 and at most 1"),
    ({"shift": float("inf")}, "shift inf must be at least 1 and finite"),
    ({"metric": lambda output, exact: None}, "metric <lambda> must return a number, but it returned NoneType"),
    ({"metric": lambda output, exact: 0.0}, "metric <lambda> is 0 for an exact output compared with itself, but a pl"),
    ({"metric": "cosin"}, "no metric 'cosin'; did you mean 'cosine'"),
    ({"score": lambda output, item: output[0]}, r"score <lambda> must return a number, .* of shape \(1, 20, 32\)"),
    ({"inputs": ["a text"] * 9, "score": lambda output, item: 1.0}, "score judges .* texts are planned by the cosine"),
])  # fmt: skip
@pytest.mark.usefixtures("timed")
def test_what_cannot_be_planned_is_said_in_one_line_and_the_model_is_as_it_was(arguments, message):
    model = sharp("bert")
    sq.hf.swap(model, "local:window=3")
    asked = {"inputs": inputs(12), "methods": METHODS} | arguments
    with pytest.raises((TypeError, ValueError), match=message) as error:
        sq.plan(model, **asked)
    assert "\n" not in str(error.value)
    assert sq.hf.describe(model).methods == {0: sq.Local(window=3), 1: sq.Local(window=3)}


@pytest.mark.parametrize(("arguments", "message"), [
    ({"inputs": torch.zeros(12, 20)}, "inputs are a list of mappings or of texts, got one Tensor"),
    ({"inputs": None}, "inputs are a list of mappings or of texts, got one NoneType"),
    ({"min_fidelity": "0.9"}, "min_fidelity must be a number, got '0.9'"),
    ({"lengths": 512}, "lengths must be a sequence of whole numbers, .* got 512"),
    ({"lengths": ["512"]}, "lengths must be whole numbers, got '512'"),
    ({"score": "accuracy"}, "score must be a function of the output and the input, got 'accuracy'"),
    ({"metric": 3}, "metric must be a name or a function of the output and the exact output, got 3"),
])  # fmt: skip
@pytest.mark.usefixtures("unchecked")  # the checks of annotations would say so first
def test_an_argument_of_another_type_is_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        sq.plan(sharp("bert"), **{"inputs": inputs(12), "methods": METHODS} | arguments)


@pytest.mark.usefixtures("timed")
def test_a_module_around_a_model_gets_the_plan_of_that_model():
    model = sharp("bert")
    around = torch.nn.ModuleDict({"model": model, "head": torch.nn.Linear(2, 2)})
    wanted = sq.plan(model, inputs(12), min_fidelity=0.3, methods=METHODS)
    assert sq.plan(around, inputs(12), min_fidelity=0.3, methods=METHODS) == wanted
    assert sq.hf.swap(around, wanted).methods


@pytest.mark.usefixtures("timed")
def test_what_was_swapped_in_runs_again_afterwards():
    model = sharp("bert")
    wanted = sq.plan(model, inputs(12), min_fidelity=0.3, methods=METHODS)
    sq.hf.swap(model, "local:window=3", keep="first")
    assert sq.plan(model, inputs(12), min_fidelity=0.3, methods=METHODS) == wanted
    assert sq.hf.describe(model).methods == {0: sq.Local(window=3), 1: sq.Local(window=3)}
    assert sq.hf.describe(model).keep == "first"
    with pytest.raises(ValueError, match="no method 'lokal'"):
        sq.plan(model, inputs(12), methods=["lokal"])
    with pytest.raises(ValueError, match="4 inputs have 20 tokens"):
        sq.plan(model, inputs(4))
    assert sq.hf.describe(model).methods[0] == sq.Local(window=3)
    with pytest.raises(ValueError, match=r"in training mode, .*: call model.eval"):
        sq.plan(model.train(), inputs(12))


@pytest.mark.usefixtures("timed")
def test_the_record_of_a_plan_that_was_swapped_in_stays(tmp_path):
    model = sharp("bert")
    sq.hf.swap(model, sq.plan(model, inputs(18), min_fidelity=0.3, methods=["local:window=2"]))
    before = model.config.subquad
    assert {"floor", "verified", "versions"} <= before.keys()
    with recorded(model):
        pass
    assert model.config.subquad == before
    sq.plan(model, inputs(12), min_fidelity=0.3, methods=["local:window=12"])
    assert model.config.subquad == before
    with sq.audit(model):  # by the floor of the plan
        pass


@pytest.mark.long
@pytest.mark.usefixtures("timed")
def test_twelve_llama_layers(tmp_path):
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
    items = inputs(12, 32)

    def planned(floor):
        return sq.plan(model, items, min_fidelity=floor, shift=1, methods=["local:window=12", "local:window=2"])

    near, far = planned(0.9999), planned(0.5)
    assert sorted(far.layers) == list(range(12))
    windowed = [sum("local" in str(method) for method in plan.layers.values()) for plan in (near, far)]
    assert windowed[0] < windowed[1]
    assert far.verified["32"]["bound"] >= 0.5
    again = sq.load_plan(far.save(tmp_path))
    assert sq.hf.swap(model, again).methods == far.layers
    assert model(**items[0]).logits.isfinite().all()


@pytest.mark.usefixtures("timed")
def test_a_causal_model_is_planned_with_causal_methods():
    model = sharp("llama")
    plan = sq.plan(model, inputs(12), min_fidelity=0.2, methods=["clustered:clusters=8", "local:window=12"])
    assert {m.name for m in plan.layers.values()} <= {"full", "local", "by-length"}
    assert sq.hf.swap(model, plan).methods == plan.layers


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize(("options", "message"), [
    (["--min-fidelity", "0"], "min-fidelity 0 must be above 0 and at most 1"),
    (["--min-fidelity", "1.5"], "min-fidelity 1.5 must be above 0 and at most 1"),
    (["--shift", "0.5"], "shift 0.5 must be at least 1"),
    (["--minutes", "0"], "minutes 0 must be at least 0.1 and finite"),
    (["--minutes", "inf"], "minutes inf must be at least 0.1 and finite"),
    (["--lengths", "8"], "a length of 8 is too short to plan for"),
    (["--lengths", "many"], "length 'many' is not a whole number"),
    (["--lengths", "100000"], "less than five passages of 100,000"),
    (["--methods", "lokal"], "no method 'lokal'; did you mean 'local'"),
    (["--adapter", "nowhere"], "no adapter at nowhere"),
    (["--lengths", "32", "--methods", "full"], "the methods name none but exact attention"),
    (["--lengths", "32", "nan"], "of attention layer 1 (encoder.layer.1.attention.self) is not finite"),
])  # fmt: skip
def test_bad_input_is_one_line(options, message, model, text, tmp_path):
    name, words = ("nan", options[:-1]) if options[-1] == "nan" else ("bert", options)
    done = run(app, ["plan", model(name), "--text", str(text), "--out", str(tmp_path), *words])
    assert done.exit_code == 2, done.output
    said = " ".join(done.stderr.split())
    assert message in said
    assert not (tmp_path / "plan.json").exists()


def test_without_a_model_the_first_line_names_the_one_that_is_planned(model, text, tmp_path, monkeypatch):
    def make(settings, *_):
        raise InputError(f"{settings.model} is not planned here")

    monkeypatch.setattr(running, "make", make)
    words = ["plan", "--text", str(text), "--out", str(tmp_path)]
    said = run(app, words).stderr.splitlines()
    assert " ".join(said[:2]).startswith("Planning for demo-encoder: no model was given, and its passes take")
    assert "Planning for" not in run(app, [*words, "--quiet"]).stderr
    assert "Planning for" not in run(app, [*words, model("bert")]).stderr


@pytest.mark.usefixtures("timed")
@pytest.mark.parametrize(("name", "floor"), [("bert", "0.2"), ("gpt2", "0.001"), ("masked", "0.9")])
def test_the_command_writes_a_plan_and_its_report(name, floor, model, text, tmp_path, monkeypatch):
    monkeypatch.setattr(loads, "MOST", 3)
    words = [
        "plan",
        model(name),
        "--text",
        str(text),
        "--lengths",
        "32,64",
        "--max-kl" if name == "gpt2" else "--min-fidelity",
        floor,
    ]
    done = run(app, [*words, "--methods", "local:window=2 clustered:clusters=8", "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert [p["length"] for p in report["lengths"]] == [32, 64]
    assert report["kind"] == "plan"
    for length in report["lengths"]:
        assert "verified" in length or length["exact_because"]
        if "verified" in length:
            assert length["verified"]["bound"] <= (1 - exp(-float(floor)) if name == "gpt2" else 1 - float(floor))
    plan = sq.load_plan(tmp_path)
    assert plan.lengths == (32, 64)
    assert {p.name for p in tmp_path.iterdir()} >= {"plan.json", "report.html", "report.md", "report.json"}
    page = (tmp_path / "report.md").read_text()
    assert report["headline"].split(":")[0] in page
    said = run(app, [*words, "--methods", "local:window=2", "--out", str(tmp_path), "--again"])
    assert said.exit_code == 0, said.output
    assert "plan.json" in said.stdout
