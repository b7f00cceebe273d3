"""`sq.plan`: a method for each layer of a module."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

import subquad as sq
from subquad.nn.swapping import NAME
from subquad.tools.modules import module_planning as planning
from subquad.tools.plan.settings import PlanSettings
from tests.tools.modules.models import LayerBlock, SdpaBlock, encoder, inputs
from tests.tools.modules.test_compare import assert_unchanged, state_of

CRUDE, CLOSE = "clustered:clusters=4", "i-clustered:clusters=16"
IN_A_LAYER = {"full": 1.0, CRUDE: 0.2, CLOSE: 0.6}  # seconds


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that depend on the methods alone: those of `IN_A_LAYER` in each layer, and one of everything else."""

    def in_layers(inputs, methods, *_):
        return {name: IN_A_LAYER[name] for name in ("full", *methods)}

    def whole(call, *_):
        module = call.args[0]
        methods = [str(part.subquad.method) for part in module.modules() if NAME in part._modules]
        layers = sum(isinstance(part, nn.MultiheadAttention) for part in module.modules())
        output = call()
        return 1.0 + sum(IN_A_LAYER[method] for method in methods) + layers - len(methods), output

    monkeypatch.setattr(planning, "call_times", in_layers)
    monkeypatch.setattr(planning, "stopwatch", whole)


def uneven():
    """Two layers, of which the second contributes almost nothing to the output."""
    return nn.Sequential(LayerBlock(share=1.0), LayerBlock(share=1e-4))


def test_a_layer_that_bears_nothing_gets_the_cheap_method(clock):
    module, items = uneven(), inputs(*[60] * 8)
    plan = sq.plan(module, items, methods=[CRUDE, CLOSE], min_fidelity=0.9999, minutes=9.0)
    assert plan.why_exact is None
    assert plan.layers == {"1.attention": sq.methods.resolve(CRUDE)}
    assert plan.verified.cost["speedup"] == pytest.approx(3.0 / 2.2)
    assert plan.verified.inputs == 6
    assert plan.losses["1.attention"] < 1e-4


def test_what_was_verified_is_what_swap_gives(clock):
    module, items = uneven().eval(), inputs(*[60] * 6)
    plan = sq.plan(module, items, methods=[CRUDE, CLOSE], min_fidelity=0.9, minutes=0.5)
    assert plan.why_exact is None
    with torch.no_grad():
        exact = [module(x) for x in items]
        sq.nn.swap(module, plan.layers)
        cosines = [
            float(nn.functional.cosine_similarity(module(x), y, dim=-1).mean())
            for x, y in zip(items, exact, strict=True)
        ]
    assert min(cosines) - 1e-6 <= plan.verified.fidelity <= max(cosines) + 1e-6
    assert 0.9 <= plan.verified.least <= plan.verified.fidelity
    assert str(plan.verified) in str(plan)


@pytest.mark.parametrize("lengths", [(60, 60, 90, 90), (20, 20, 30, 30, 40, 40, 50, 50, 60, 60, 90, 90)])
def test_methods_are_screened_and_passes_timed_on_the_longest_input(lengths, clock, monkeypatch):
    screened, timed, stopwatch = [], [], planning.stopwatch

    def in_layers(layer, methods, *_):
        screened.append(layer.query.shape[-2])
        return {name: IN_A_LAYER[name] for name in ("full", *methods)}

    def first(call, *args):
        timed.append(call.func.__self__.args[0].shape[1])
        return stopwatch(call, *args)

    monkeypatch.setattr(planning, "call_times", in_layers)
    monkeypatch.setattr(planning, "stopwatch", first)
    sq.plan(uneven(), inputs(*lengths), methods=[CRUDE, CLOSE], min_fidelity=0.9, minutes=9.0)
    assert set(screened) == {90}
    assert timed[:2] == [90, 90]


def test_exact_attention_stays_if_nothing_keeps_the_fidelity(clock):
    plan = sq.plan(LayerBlock(), inputs(*[60] * 6), methods=CRUDE, min_fidelity=0.999999, minutes=0.5)
    assert plan.layers == {}
    assert plan.why_exact == "no method in any layer is faster and keeps the fidelity"
    assert "Stay with exact attention" in str(plan)


def test_exact_attention_stays_if_nothing_is_faster(clock, monkeypatch):
    monkeypatch.setitem(IN_A_LAYER, CRUDE, 1.0)
    plan = sq.plan(LayerBlock(), inputs(*[60] * 6), methods=CRUDE, min_fidelity=0.1, minutes=0.5)
    assert plan.layers == {}
    assert plan.verified is None


def test_losses_that_only_held_out_inputs_have_are_seen(clock):
    module, items, scored = LayerBlock().eval(), inputs(*[60] * 8), []
    own = {id(x): module(x).detach() for x in items}

    def score(output, item):
        """0 for the method, except on the two inputs on which losses are measured."""
        scored.append(id(item))
        measured = list(dict.fromkeys(scored))[:2]
        return float(id(item) in measured or torch.allclose(output, own[id(item)], atol=1e-6))

    plan = sq.plan(module, items, methods=CRUDE, score=score, minutes=0.5)
    assert plan.layers == {}
    assert plan.verified.fidelity == 0.0
    assert "a mean loss of 1.0000" in plan.why_exact
    assert "on 6 held-out inputs" in plan.why_exact


def test_a_held_out_input_that_a_method_refuses_is_named(clock, monkeypatch):
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1)
    monkeypatch.setitem(IN_A_LAYER, "nystrom", 0.1)
    dense = torch.zeros(40, 40).bernoulli(0.5).bool().fill_diagonal_(False)
    items = [(x, dense if number in (1, 2) else None) for number, x in enumerate(inputs(*[40] * 6))]
    with pytest.raises(ValueError, match=r"nystrom did not run on input [12], which is held out"):
        sq.plan(module, items, methods="nystrom", min_fidelity=0.1, minutes=9.0)


def test_the_plan_prints_and_is_plain_data(clock):
    plan = sq.plan(uneven(), inputs(*[60] * 6), methods=[CRUDE], min_fidelity=0.9999, minutes=0.5)
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["layers"] == {"1.attention": CRUDE}
    assert "| 0.attention | MultiheadAttention | (the layer's own) | – |" in plan._repr_markdown_()
    assert "fidelity" in str(plan)


@pytest.mark.parametrize("ask", [sq.compare, sq.plan])
def test_nested_tensors_are_inputs(ask, unchecked):
    generator = torch.Generator().manual_seed(0)
    items = [
        torch.nested.nested_tensor([torch.randn(length, 32, generator=generator) for length in (20, longest)])
        for longest in (30, 30, 30, 40, 40, 40)
    ]
    result = ask(encoder(1).eval(), items, methods=CRUDE, min_fidelity=0.1, minutes=0.05)
    if ask is sq.plan:
        assert result.verified is not None or result.why_exact
    else:
        (row,) = [row for row in result.rows if row["method"] == CRUDE]
        assert row["status"] == "measured"
        assert set(row["fidelity"]) == {"30", "40"}


def test_causal_layers_get_what_they_can_run(clock, monkeypatch):
    module = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), 1)
    mask = nn.Transformer.generate_square_subsequent_mask(40)
    items = [(x, memory, mask) for x, memory in zip(inputs(*[40] * 5), inputs(*[30] * 5, seed=1), strict=True)]
    plan = sq.plan(module, items, methods="nystrom", min_fidelity=0.1, minutes=0.2)
    assert plan.layers == {}
    monkeypatch.setitem(IN_A_LAYER, "performer", 0.5)
    plan = sq.plan(module, items, methods=["nystrom", "performer"], min_fidelity=0.1, minutes=0.2)
    assert set(plan.layers) == {"layers.0.self_attn", "layers.0.multihead_attn"}
    assert {str(method) for method in plan.layers.values()} == {"performer"}


def test_neighbouring_layers_are_measured_together_if_time_is_short(clock):
    plan = sq.plan(encoder(4), inputs(*[40] * 6), methods=CRUDE, min_fidelity=0.5, minutes=0.001)
    assert any("layers at a time" in note for note in plan.notes)
    assert plan.verified.inputs >= 2


def test_it_plans_with_the_real_clock_and_the_default_methods():
    plan = sq.plan(encoder(1), inputs(*[64] * 4), min_fidelity=0.5, minutes=0.05)
    assert set(plan.layers) <= set(plan.kinds) == {"layers.0.self_attn"}
    assert (plan.why_exact is None) == bool(plan.layers)


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_what_it_was(fails):
    module = uneven()
    sq.nn.swap(module, {"0.*": "lha:buckets=2"})
    before, calls = state_of(module), []

    def metric(output, exact):
        calls.append(1)
        if fails and len(calls) == 3:
            raise ZeroDivisionError
        return 1.0

    if fails:
        with pytest.raises(ZeroDivisionError):
            sq.plan(module, inputs(*[40] * 5), methods=CRUDE, metric=metric, minutes=0.05)
    else:
        sq.plan(module, inputs(*[40] * 5), methods=CRUDE, metric=metric, minutes=0.05)
    assert_unchanged(module, before)


BERT = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("module", "count", "options", "error", "message"),
    [
        (encoder(1), 3, {}, ValueError, "there are 3 inputs, but a plan needs 4"),
        (SdpaBlock(), 4, {}, ValueError, "no layers that sq.nn.swap takes"),
        (nn.Linear(32, 3), 4, {}, ValueError, "there is no attention in this Linear"),
        (sq.nn.MultiheadAttention(32, 4), 4, {}, ValueError, "build the module with another method=, and compare"),
        (encoder(1), 4, {"methods": "lha"}, ValueError, "learned parameters, .* leave it out of methods$"),
        (encoder(1), 4, {"metric": "cosin"}, ValueError, "did you mean 'cosine'"),
        (encoder(1), 4, {"metric": lambda *_: float("inf")}, ValueError, "is inf for the exact output"),
        (encoder(1), 4, {"minutes": -1.0}, ValueError, "minutes -1 must be above 0"),
        (torch.compile(encoder(1)), 4, {}, TypeError, r"this OptimizedModule is compiled, .* \(compiled\._orig_mod\)"),
        ("encoder", 4, {}, TypeError, "expected a model, got 'encoder': load it first"),
    ],
)
def test_bad_input(unchecked, module, count, options, error, message):
    with pytest.raises(error, match=message):
        sq.plan(module, inputs(*[30] * count), **{"methods": CRUDE, "minutes": 0.01} | options)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"shift": 1.6}, "shift is for"),
        ({"lengths": (512, 2048, 4096)}, "lengths is for"),
        ({"seed": 0, "out": "plans"}, "seed and out are for"),
    ],
)
def test_arguments_for_transformers_models_are_refused_for_another_module(arguments, named):
    with pytest.raises(
        ValueError, match=f"{named} transformers models, .* TransformerEncoder contains none: it gets one plan"
    ):
        sq.plan(encoder(1), inputs(*[30] * 5), **arguments)


def test_a_module_around_a_transformers_model_is_planned_by_length(monkeypatch):
    model = transformers.BertModel(transformers.BertConfig(**BERT))
    around, asked = nn.Sequential(model), []
    monkeypatch.setattr("subquad.tools.plan.run.plan_by_length", lambda *args, out, **_: asked.append((*args, out)))
    items = [{"input_ids": torch.arange(9)[None]}] * 5
    sq.plan(around, items, lengths=[9])
    sq.plan(around, items, shift=1.1, seed=3, out="plans")
    first, second = asked
    assert first[:2] == second[:2] == (around, items)
    defaults = PlanSettings(min_fidelity=0.99)
    assert first[2] == replace(defaults, lengths=(9,))
    assert second[2:] == (replace(defaults, shift=1.1, seed=3), "plans")


def test_inputs_that_show_no_loss_leave_exact_kernels_alone_and_a_note():
    kernel = "full:kernel=subquad"
    modules = planning.ModulePlanning.__new__(planning.ModulePlanning)
    modules.candidates = [planning.Candidate(x, {0: sq.methods.resolve(x)}) for x in (CRUDE, CLOSE, kernel)]
    modules.accepted = 0.01

    def told_apart(losses, without):
        planned = planning.Planned(60, losses=losses, without=without)
        modules.tell_apart(planned)
        return planned.losses, modules.accepted_of(planned), planned.unproven

    losses = {0: {CRUDE: [1e-6], CLOSE: [0.0], kernel: [0.0]}}
    left, _, note = told_apart(losses, 0.5)
    assert left == {0: {kernel: [0.0]}}
    assert note.startswith("These inputs do not tell methods apart: both approximations have")
    losses[0][CRUDE] = [0.004]
    left, accepted, note = told_apart(losses, 0.05)
    assert (left, accepted) == (losses, pytest.approx(0.005))
    assert note.startswith("Without any attention the loss is only 0.0500, so a tenth of that is accepted")
    assert told_apart(losses, None) == told_apart(losses, 0.5) == (losses, 0.01, None)
