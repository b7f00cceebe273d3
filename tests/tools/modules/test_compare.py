"""`sq.compare` on modules of every kind."""

import json
import math
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

import subquad as sq
from subquad.tools.compare.module_result import ModuleComparison
from subquad.tools.compare.schema import MethodReport
from subquad.tools.compare.settings import COMPARED, COMPARED_CAUSAL
from subquad.tools.measure.timing import Cost
from tests.tools.modules.models import LayerBlock, SdpaBlock, encoder, inputs

CRUDE, CLOSE = "clustered:clusters=4", "i-clustered:clusters=8,topk=16"
BERT = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def rows_of(result):
    return {row["method"]: row for row in result.rows}


def measured(result):
    return [row["method"] for row in result.rows if row["status"] in ("measured", "refused")]


def tokens(count, length=40):
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(5, 60, (1, length), generator=generator)} for _ in range(count)]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# ---------------------------------------------------------------------- what is measured


def test_fidelity_is_the_mean_cosine_to_the_modules_own_attention():
    module, items = nn.Sequential(LayerBlock(), LayerBlock()), inputs(50, 50, 50)
    result = sq.compare(module, items, methods=[CRUDE, CLOSE], minutes=3.0)

    module.eval()
    with torch.no_grad():
        exact = [module(x) for x in items]
        for method in (CRUDE, CLOSE):
            sq.nn.swap(module, method)
            cosines = [
                nn.functional.cosine_similarity(module(x), y, dim=-1).mean() for x, y in zip(items, exact, strict=True)
            ]
            sq.nn.restore(module)
            expected = float(torch.stack(cosines).mean())
            assert rows_of(result)[str(sq.methods.resolve(method))]["fidelity"]["50"] == pytest.approx(expected, 1e-5)
            assert expected < 0.9999
    assert result.rows[0]["status"] == "exact"
    assert result.rows[0]["fidelity"] == {"50": pytest.approx(1.0)}


def test_each_length_has_its_figures():
    result = sq.compare(encoder(), inputs(20, 70, 20, 70, 20), methods=CRUDE, minutes=3.0)
    assert result.lengths == {20: 3, 70: 2}
    for row in result.rows:
        assert set(row["fidelity"]) == set(row["model"]) == {"20", "70"}
        for cost in row["model"].values():
            assert cost["ms"] > 0
            assert cost["extra_mib"] > 0
            assert cost["repeats"] >= 1
    assert "verdict" in result.rows[1]["model"]["20"]
    assert set(result.noise) == {20, 70}


def test_many_lengths_are_one_group_under_the_longest():
    result = sq.compare(encoder(), inputs(20, 25, 30, 35, 40), methods=CRUDE, minutes=3.0)
    assert result.lengths == {40: 5}
    assert any("more than 4 lengths" in note for note in result.notes)


def test_the_default_methods_are_those_of_the_command():
    result = sq.compare(encoder(1), inputs(20), minutes=0.01)
    assert measured(result) == [str(sq.methods.resolve(text)) for text in COMPARED]


def test_a_first_result_comes_whatever_the_minutes_are():
    result = sq.compare(encoder(), inputs(*[30] * 8), methods=CRUDE, minutes=1e-6)
    assert result.lengths == {30: 1}
    assert result.rows[1]["model"]["30"]["repeats"] == 1
    assert result.rows[1]["model"]["30"]["extra_mib"] is None
    assert any("1 of 8 inputs" in note for note in result.notes)
    assert "There was no time to measure memory at 30 tokens." in result.notes


def test_inputs_are_tensors_tuples_or_mappings():
    module = encoder(1)
    (x,) = inputs(30)
    padding = torch.arange(30)[None] >= 20
    items = [x, (x, None, padding), {"src": x, "src_key_padding_mask": padding}]
    values = []
    sq.compare(module, items, methods=CRUDE, minutes=3.0, score=lambda output, item: values.append(item) or 1.0)
    assert {id(value) for value in values} == {id(item) for item in items}


def test_mappings_that_the_module_writes_into_stay_as_they_are():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = LayerBlock()

        def forward(self, features):
            features["out"] = self.block(features.pop("x"))
            return features

    item = ({"x": inputs(30)[0]},)
    result = sq.compare(Writes(), [item], methods=CRUDE, minutes=0.01)
    assert list(item[0]) == ["x"]
    assert result.rows[1]["status"] == "measured"


# ---------------------------------------------------------------------- where methods go


def test_a_transformers_model_is_swapped_by_hf():
    model = transformers.BertModel(transformers.BertConfig(**BERT))
    result = sq.compare(model, tokens(2), methods="local:window=4", minutes=0.05)
    assert result.attention == "sq.hf.swap (2 layers)"
    assert result.rows[1]["fidelity"]["40"] < 1.0 - 1e-6


def test_methods_that_are_exact_in_causal_attention_are_not_taken_for_approximations(monkeypatch):
    """At 48 tokens, one diagonal block of attention by halves has all of them."""
    monkeypatch.setattr("subquad.tools.compare.recommend.TOO_NOISY", math.inf)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BERT, max_position_embeddings=64)).to(
        torch.bfloat16
    )
    names = ["clustered-tail", "clustered-tail:clusters=48,topk=96"]
    result = sq.compare(model, tokens(1, 48), methods=names, metric="kl", minutes=0.01)
    assert result.causal
    assert [row.get("dtype") for row in result.rows] == [None, "bf16", "bf16", None]
    advice = result.recommendation
    assert "does not tell methods apart" not in advice.headline
    assert advice.reasons[0].startswith("48 tokens: no approximation was measured; those tried are exact attention")


def test_a_causal_language_model_is_compared_by_its_logits_and_default_rows():
    config = transformers.LlamaConfig(**BERT, max_position_embeddings=64)
    result = sq.compare(transformers.LlamaForCausalLM(config), tokens(1), metric="kl", minutes=0.01)
    assert measured(result) == [str(sq.methods.resolve(text)) for text in COMPARED_CAUSAL]
    assert all(row["fidelity"]["40"] <= 1.0 + 1e-9 for row in result.rows if row["status"] != "refused")


def test_calls_of_sdpa_are_intercepted_and_those_that_stay_exact_are_counted():
    module = nn.Sequential(SdpaBlock(), SdpaBlock(is_causal=True))
    result = sq.compare(module, inputs(50), methods=["smyrf:clusters=2", CRUDE], minutes=0.05)
    assert result.attention == "sq.intercept (2 calls)"
    smyrf, clustered, _ = result.rows[1:]
    assert any("1 of 2 calls stay exact: 'smyrf' does not support a causal mask" in note for note in smyrf["remarks"])
    assert "remarks" not in clustered
    assert clustered["fidelity"]["50"] < 0.999999


def test_a_method_that_no_layer_runs_is_a_row_with_the_reason():
    module = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), 1)
    mask = nn.Transformer.generate_square_subsequent_mask(40)
    item = (*inputs(40, 30), mask)
    result = sq.compare(module, [item], methods=["nystrom", "performer", "clustered"], minutes=0.05)
    assert [row["status"] for row in result.rows[:4]] == ["exact", "refused", "measured", "measured"]
    assert "input 0: 'nystrom' does not support a causal mask" in result.rows[1]["reason"]
    assert "1 of 2 layers stay exact: 'clustered' mixes queries" in result.rows[3]["remarks"][0]
    assert "Not run: nystrom: input 0" in str(result)


def test_a_method_of_one_layer_is_refused_in_calls_of_sdpa():
    result = sq.compare(nn.Sequential(SdpaBlock()), inputs(40), methods=["lha:buckets=2", CRUDE], minutes=0.02)
    assert "learned parameters" in result.rows[1]["reason"]


def test_learned_parameters_that_were_not_fitted_are_noted():
    result = sq.compare(encoder(1), inputs(40), methods="lha:buckets=2", minutes=0.02)
    assert result.rows[1]["remarks"] == ["not calibrated: its learned parameters are those that it starts with"]


def test_attention_that_no_method_reaches_is_noted():
    unreplaceable = SdpaBlock(dropout=1e-9)  # which counts too
    module = nn.Sequential(LayerBlock(), SdpaBlock(), unreplaceable)
    result = sq.compare(module, inputs(40), methods=CRUDE, minutes=0.02)
    assert result.attention == "sq.nn.swap (1 layer)"
    assert result.notes[0].startswith("2 of 3 calls of attention are outside of the layers that sq.nn.swap reaches")


# ---------------------------------------------------------------------- rows to compare with


def test_exact_attention_by_the_path_of_the_methods_is_a_row():
    result = sq.compare(encoder(1), inputs(30), methods=CRUDE, minutes=0.05)
    row = rows_of(result)["full (by sq.nn.swap)"]
    assert row["status"] == "reference"
    assert row["fidelity"]["30"] == pytest.approx(1.0, abs=1e-6)
    assert row["model"]["30"]["speedup"] != 1.0  # it was timed: torch's own encoder layers run by a fused kernel
    calls = sq.compare(SdpaBlock(), inputs(30), methods=CRUDE, minutes=0.02)
    assert [row["method"] for row in calls.rows] == ["full", CRUDE, "without attention"]


@pytest.mark.parametrize("make", [LayerBlock, SdpaBlock])
def test_the_least_fidelity_is_that_of_an_attention_of_zero(make):
    module, items = make().eval(), inputs(30)
    result = sq.compare(module, items, methods=CRUDE, minutes=0.02)
    output = (module.out if make is SdpaBlock else module.attention.out_proj).bias  # of an attention of 0
    with torch.no_grad():
        expected = nn.functional.cosine_similarity(items[0] + output, module(items[0]), dim=-1).mean()
    assert rows_of(result)["without attention"]["fidelity"]["30"] == pytest.approx(float(expected), 1e-5)
    assert float(expected) < rows_of(result)[CRUDE]["fidelity"]["30"]


def test_a_transformers_model_has_the_row_too():
    model = transformers.BertModel(transformers.BertConfig(**BERT, initializer_range=0.5))
    result = sq.compare(model, tokens(1), methods="local:window=4", minutes=0.02)
    assert [row["method"] for row in result.rows] == ["full", "local:window=4", "without attention"]
    assert result.rows[2]["fidelity"]["40"] < 0.999


def test_a_scale_that_tells_nothing_apart_is_said():
    alike, apart = (
        str(sq.compare(LayerBlock(share), inputs(30, 60), methods=CRUDE, minutes=0.05)) for share in (1e-3, 2.0)
    )
    assert "This comparison does not tell methods apart." in alike
    for length in (30, 60):
        assert f"At {length} tokens, the fidelity without any attention is still 1.0000" in alike
    assert "does not tell methods apart" not in apart


def test_where_all_methods_tie_at_the_top_exact_attention_is_recommended_and_that_comes_first():
    """A module with random weights and pooled output has cosines of 1.0000, with relative errors that differ."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder()

        def forward(self, x):
            return self.encoder(x).mean(1)

    result = sq.compare(Pooled(), inputs(300), methods=["clustered:clusters=25", CLOSE], minutes=0.05)
    rows = rows_of(result)
    assert {round(rows[name]["fidelity"]["300"], 4) for name in measured(result)} == {1.0}
    assert result.recommendation.by_length == {300: None}
    assert result.recommendation.headline.startswith(
        "This comparison does not tell methods apart. At 300 tokens, both approximations have the fidelity of exact "
        "attention, 1.0000 (without attention: 0."
    )


def test_the_relative_error_is_next_to_the_fidelity_unless_it_is_the_fidelity():
    module, items = LayerBlock(), inputs(50, 50)
    result = sq.compare(module, items, methods=CRUDE, minutes=0.05)
    with torch.no_grad():
        exact = [module.eval()(x) for x in items]
        sq.nn.swap(module, CRUDE)
        errors = [(module(x) - y).norm() / y.norm() for x, y in zip(items, exact, strict=True)]
        sq.nn.restore(module)
    assert rows_of(result)[CRUDE]["relative_error"]["50"] == pytest.approx(float(sum(errors)) / 2, 1e-4)
    assert result.rows[0]["relative_error"]["50"] == 0.0
    assert "rel. error" in str(result)
    assert "rel. error" not in str(sq.compare(module, items, methods=CRUDE, metric="relative-error", minutes=0.02))


# ---------------------------------------------------------------------- metrics


def test_a_metric_is_called_with_the_output_and_the_exact_output():
    module, items = LayerBlock().eval(), inputs(40)
    with torch.no_grad():
        exact = module(*items)
    result = sq.compare(
        module,
        items,
        methods=CRUDE,
        metric=lambda output, reference: -(output - reference).abs().mean(),
        min_fidelity=-1.0,
        minutes=0.02,
    )
    with torch.no_grad():
        sq.nn.swap(module, CRUDE)
        expected = -float((module(*items) - exact).abs().mean())
    assert result.rows[0]["fidelity"]["40"] == 0.0
    assert result.rows[1]["fidelity"]["40"] == pytest.approx(expected, 1e-4)


def test_the_fidelity_of_a_score_is_one_less_what_is_lost():
    module, items = LayerBlock(), inputs(30, 30)
    own = {id(x): module.eval()(x).detach() for x in items}

    def equal(output, item):
        return torch.allclose(output, own[id(item)], atol=1e-5)

    result = sq.compare(module, items, methods=[CRUDE, "full:kernel=subquad"], score=equal, minutes=0.05)
    assert [row["task"]["30"] for row in result.rows] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert [row["fidelity"]["30"] for row in result.rows] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert result.metric == "score equal"
    assert " score " in str(result).splitlines()[1]


def test_another_module_may_be_the_exact_one():
    module, other = LayerBlock(), LayerBlock()
    result = sq.compare(module, inputs(30), methods=CRUDE, exact=other, minutes=0.02)
    module.eval(), other.eval()
    with torch.no_grad():
        (x,) = inputs(30)
        expected = nn.functional.cosine_similarity(module(x), other(x), dim=-1).mean()
    assert result.rows[0]["fidelity"]["30"] == pytest.approx(float(expected), 1e-5)
    assert float(expected) < 0.999


def test_the_module_in_fp32_is_the_exact_one_of_bf16():
    module = encoder(1)
    exact = encoder(1)
    exact.load_state_dict(module.state_dict())

    class Casts(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x.to(next(self.inner.parameters()).dtype)).float()

    result = sq.compare(Casts(module.bfloat16()), inputs(30), methods=CRUDE, exact=Casts(exact), minutes=0.02)
    assert 0.99 < result.rows[0]["fidelity"]["30"] < 1.0 - 1e-7
    assert result.rows[1]["status"] == "measured"


# ---------------------------------------------------------------------- the result


def test_the_result_prints_and_is_plain_data():
    result = sq.compare(encoder(1), inputs(30), methods=[CRUDE, "nystrom"], minutes=0.05)
    text, markdown = str(result), result._repr_markdown_()
    assert text.splitlines()[0] == (
        "TransformerEncoder, by sq.nn.swap (1 layer); fidelity: cosine; speed: relative to full (the module's own)"
    )
    names = [line.strip().partition("  ")[2].partition("  ")[0].strip() for line in text.splitlines()[2:7]]
    assert names == ["full (the module's own)", "full (by sq.nn.swap)", CRUDE, "nystrom", "without attention"]
    assert CRUDE in text
    assert "| tokens | method | fidelity | rel. error | ms | speed | extra MiB |" in markdown
    assert result.recommendation.headline in text
    data = json.loads(json.dumps(result.to_dict()))
    assert [row["method"] for row in data["rows"]][:3] == ["full", CRUDE, "nystrom"]
    assert data["recommendation"]["headline"] == str(result.recommendation)


def comparison(*rows, min_fidelity=0.99):
    def report(method, fidelity, speedup, verdict="faster"):
        cost = {"ms": 1.0, "ms_low": 1.0, "ms_high": 1.0, "repeats": 9, "speedup": speedup, "extra_mib": 1.0}
        return MethodReport(
            method=method,
            settings=sq.methods.resolve(method).to_dict(),
            status="exact" if method == "full" else "measured",
            fidelity={"512": fidelity, "2048": fidelity},
            model={"512": Cost(**cost, verdict="within the noise"), "2048": Cost(**cost, verdict=verdict)},
        )

    reports = tuple(report(*row) for row in (("full", 1.0, 1.0), *rows))
    return ModuleComparison("M", "sq.nn.swap", "cosine", min_fidelity, {512: 2, 2048: 2}, reports, {}, ())


def test_the_fastest_row_that_keeps_the_fidelity_is_recommended():
    result = comparison(("clustered", 0.98, 4.0), ("i-clustered", 0.995, 2.0), ("clustered-tail", 0.999, 1.5))
    assert result.recommendation.by_length == {512: None, 2048: sq.methods.resolve("i-clustered")}
    assert result.recommendation.method is None


def test_rows_to_compare_with_are_not_recommended():
    result = comparison(("clustered", 0.98, 4.0), ("performer", 1.0, 9.0))
    exact, clustered, performer = result.methods
    without = replace(performer, method="without attention", status="reference")
    result = replace(result, methods=(exact, clustered, without))
    assert result.recommendation.by_length == {512: None, 2048: None}
    assert "1 setting of 1 method was tried" in result.recommendation.reasons[-1]


def test_exact_attention_is_recommended_where_nothing_keeps_the_fidelity():
    result = comparison(("clustered", 0.98, 4.0), ("clustered-tail", 0.999, 1.5, "within the noise"))
    assert result.recommendation.by_length == {512: None, 2048: None}
    assert str(result.recommendation).startswith("Stay with exact attention")


# ---------------------------------------------------------------------- the module afterwards


def state_of(module):
    return OrderedDict(
        (name, (part, dict(vars(part)), list(part._modules), list(part._forward_hooks), part.training))
        for name, part in module.named_modules()
    )


def assert_unchanged(module, before):
    after = state_of(module)
    assert list(after) == list(before)
    for name, (part, attributes, children, hooks, training) in before.items():
        assert after[name][0] is part
        assert after[name][2:] == (children, hooks, training)
        assert attributes.keys() == after[name][1].keys()
        assert all(value is after[name][1][key] for key, value in attributes.items())


class Remembers(nn.Module):
    """A module with a state of its own, modes that differ, and a hook."""

    def __init__(self):
        super().__init__()
        self.block = LayerBlock()
        self.head = nn.Linear(32, 32).eval()
        self.register_buffer("calls", torch.zeros(()))
        self.lengths = []

    def forward(self, x):
        self.calls += 1
        self.lengths.append(x.shape[1])
        self.last = x
        return self.head(self.block(x))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("swapped", [None, "clustered:clusters=8", "lha:buckets=2"])
def test_the_module_is_what_it_was(fails, swapped):
    module = Remembers()
    module.head.register_forward_hook(lambda *_: None)
    if swapped is not None:
        sq.nn.swap(module, swapped)
    before, weights = state_of(module), {name: value.clone() for name, value in module.state_dict().items()}
    calls = []

    def metric(output, exact):
        calls.append(1)
        return 1.0 if len(calls) < 4 or not fails else "no number"

    if fails:
        with pytest.raises(TypeError, match="must return a number"):
            sq.compare(module, inputs(30, 30, 30), methods=CRUDE, metric=metric, minutes=0.05)
    else:
        sq.compare(module, inputs(30, 30, 30), methods=CRUDE, metric=metric, minutes=0.05)
    assert_unchanged(module, before)
    assert module.lengths == []
    assert module.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert module.training


@pytest.mark.parametrize("swapped", [None, "clustered:clusters=8", "lha:buckets=2"])
def test_a_transformers_model_is_what_it_was(swapped):
    model = transformers.BertModel(transformers.BertConfig(**BERT))
    if swapped is not None:
        sq.hf.swap(model, swapped)
    model.eval()
    with torch.no_grad():
        expected = model(**tokens(1)[0]).last_hidden_state
    model.train()
    before, config = state_of(model), dict(vars(model.config))
    sq.compare(model, tokens(1), methods="local:window=4", minutes=0.01)
    assert_unchanged(model, before)
    assert vars(model.config) == config
    with torch.no_grad():
        assert torch.equal(model.eval()(**tokens(1)[0]).last_hidden_state, expected)


# ---------------------------------------------------------------------- bad input


class Weighs(nn.Module):
    """A layer that is asked for its weights."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class AddsKeys(LayerBlock):
    """A layer that no method takes."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True, add_zero_attn=True)


class Counts(nn.Module):
    """A module whose output has no floating-point tensor."""

    def __init__(self):
        super().__init__()
        self.block = LayerBlock()

    def forward(self, x):
        return {"class": self.block(x).mean(1).argmax(-1), "loss": self.block(x).mean()}


@pytest.mark.parametrize(
    ("module", "items", "options", "error", "message"),
    [
        (nn.Linear(32, 3), inputs(30), {}, ValueError, r"sq\.hf\.swap.*sq\.nn\.swap.*sq\.intercept"),
        (SdpaBlock(), [], {}, ValueError, "there are no inputs"),
        (SdpaBlock(), inputs(30)[0], {}, TypeError, "got one Tensor"),
        (SdpaBlock(), {"x": inputs(30)[0]}, {}, TypeError, "got one dict"),
        (SdpaBlock(), [inputs(30)], {}, TypeError, "input 0 is a list"),
        (SdpaBlock(), [*inputs(30), torch.randn(1, 9, 5)], {}, ValueError, "does not take input 1: RuntimeError: mat1"),
        (LayerBlock(), [*inputs(30), torch.randn(1, 9, 5)], {}, ValueError, "does not take input 1: "),
        (SdpaBlock(), [{"y": inputs(30)[0]}], {}, ValueError, "input 0: TypeError: .*unexpected keyword"),
        (SdpaBlock(), inputs(30), {"metric": "cosin"}, ValueError, "no metric 'cosin'; did you mean 'cosine'"),
        (SdpaBlock(), inputs(30), {"metric": lambda *_: float("nan")}, ValueError, "is nan for the exact output"),
        (SdpaBlock(), inputs(30), {"metric": lambda out, _: out}, TypeError, r"a tensor of shape \(1, 30, 32\)"),
        (SdpaBlock(), inputs(30), {"metric": lambda *_: None}, TypeError, "it returned NoneType"),
        (SdpaBlock(), inputs(30), {"metric": lambda *_: 0.0}, ValueError, "is 0 for the exact output itself"),
        (SdpaBlock(), inputs(30), {"metric": 3}, TypeError, "metric must be a name or a function"),
        (SdpaBlock(), inputs(30), {"metric": "kl", "score": max}, ValueError, "give one of them"),
        (SdpaBlock(), inputs(30), {"score": "accuracy"}, TypeError, "score must be a function"),
        (Counts(), inputs(30), {}, ValueError, "without a floating-point tensor that has an axis"),
        (AddsKeys(), inputs(30), {}, ValueError, "no layer of this AddsKeys can run a method: it adds keys of its own"),
        (Weighs(), inputs(30), {}, ValueError, "no method can run in this Weighs: need_weights=True"),
        (SdpaBlock(), inputs(30), {"methods": "clusterd"}, ValueError, "did you mean 'clustered'"),
        (SdpaBlock(), inputs(30), {"methods": "full"}, ValueError, "nothing to compare"),
        (SdpaBlock(), inputs(30), {"methods": []}, ValueError, "nothing to compare"),
        (SdpaBlock(), inputs(30), {"minutes": 0}, ValueError, "minutes 0 must be above 0"),
        (SdpaBlock(), inputs(30), {"minutes": float("inf")}, ValueError, "minutes inf must be above 0 and finite"),
        (SdpaBlock(), inputs(30), {"minutes": "5"}, TypeError, "minutes must be a number"),
        (SdpaBlock(), inputs(30), {"min_fidelity": 1.5}, ValueError, "min_fidelity 1.5 must be above 0"),
        (SdpaBlock(), inputs(30), {"min_fidelity": "high"}, TypeError, "min_fidelity must be a number"),
        (SdpaBlock(), inputs(30), {"exact": "fp32"}, TypeError, "exact must be a torch.nn.Module"),
        (
            SdpaBlock(),
            inputs(30),
            {"exact": SdpaBlock().double()},
            ValueError,
            "the module of `exact=` does not take input 0: ",
        ),
        ("model", inputs(30), {}, TypeError, "expected a torch.nn.Module, got str"),
    ],
)
def test_bad_input(unchecked, module, items, options, error, message):
    with pytest.raises(error, match=message):
        sq.compare(module, items, **{"methods": CRUDE, "minutes": 0.5} | options)


def compiled_forward(block):
    block.forward = torch.compile(block.forward)
    return block


def compiled_in_place(block):
    block.compile()
    return block


@pytest.mark.parametrize("compiled", [torch.compile, compiled_forward, compiled_in_place])
def test_a_compiled_module_is_refused(compiled):
    with pytest.raises(TypeError, match=r"^this (OptimizedModule|SdpaBlock) is compiled, .* \(compiled\._orig_mod\)"):
        sq.compare(compiled(SdpaBlock()), inputs(30), methods=CRUDE)
    with pytest.raises(TypeError, match=r"^'1' in this Sequential is compiled"):
        sq.compare(nn.Sequential(SdpaBlock(), compiled(SdpaBlock())), inputs(30), methods=CRUDE)


def test_a_method_whose_metric_is_not_finite_is_a_row_with_the_reason():
    result = sq.compare(
        LayerBlock(),
        inputs(30),
        methods=CRUDE,
        metric=lambda output, exact: 1.0 if torch.equal(output, exact) else float("nan"),
        minutes=0.01,
    )
    assert result.rows[1]["status"] == "refused"
    assert "input 0: its metric <lambda> is nan" in result.rows[1]["reason"]


@pytest.mark.slow
def test_it_needs_no_transformers():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch, subquad as sq\n"
        "from tests.tools.modules.models import encoder, inputs\n"
        "print(sq.compare(encoder(1), inputs(30), methods='clustered:clusters=4', minutes=0.01).attention)\n"
        "print(sq.plan(encoder(1), inputs(*[30] * 4), methods='clustered:clusters=4', minutes=0.01).module)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout.split("\n")[:2] == ["sq.nn.swap (1 layer)", "TransformerEncoder"], ran.stderr
