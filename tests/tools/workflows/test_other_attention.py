"""`subquad compare --attention`: rows of attention that is not subquad's."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from subquad.core.errors import InputError
from subquad.tools.compare.run import measure, prepare
from subquad.tools.compare.settings import CompareSettings
from subquad.tools.models.pretrained import load
from tests.tools.compare.test_recommend import EXACT, recommend, row
from tests.tools.workflows.reports import report_of

pytestmark = pytest.mark.usefixtures("undisturbed")


def without_values(module, query, key, value, attention_mask, **options):
    return sdpa_attention_forward(module, query, key, torch.zeros_like(value), attention_mask, **options)


def doubling_weights(module, query, key, value, attention_mask, **options):
    next(module.parameters()).data.mul_(2.0)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


@pytest.fixture
def registered(monkeypatch):
    """Registers attention in transformers under a name, for a test."""

    def register(name, function):
        monkeypatch.setitem(AttentionInterface._global_mapping, name, function)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, sdpa_mask)

    return register


@pytest.fixture
def settings(model, text):
    def make(name, *attention, methods=("clustered:clusters=4",), **changed):
        options = {
            "max_length": 48,
            "op_lengths": (32,),
            "passages": 4,
            "dtype": "fp32",
            "layers": True,
            "minutes": 3.0,
        }
        return CompareSettings(
            model=model(name), text=(text,), methods=methods, attention=attention, **(options | changed)
        )

    return make


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_each_is_a_row_with_its_own_figures_that_is_not_recommended(settings, registered, tmp_path, name):
    registered("no-values", without_values)
    comparison = measure(settings(name, "eager", "no-values", "eager"), tmp_path)
    report = report_of(comparison)
    rows = {method["method"]: method for method in report["methods"]}
    assert list(rows) == ["full", "clustered:clusters=4", "attention:eager", "attention:no-values"]
    eager, broken = rows["attention:eager"], rows["attention:no-values"]
    (length,) = {str(n) for n in comparison.lengths}
    assert eager["status"] == broken["status"] == "other"
    assert eager["fidelity"][length] > 1 - 1e-5
    assert broken["fidelity"][length] < 0.95
    assert eager["model"][length]["ms"] > 0
    assert not eager["op"]
    assert "layer_error" not in eager["quality"][length]
    assert "layer_error" in rows["clustered:clusters=4"]["quality"][length]
    choices = {report["recommendation"]["choice"], *report["recommendation"]["by_length"].values()}
    assert not any(choice.startswith("attention:") for choice in choices)
    assert any("attention:eager: transformers' attention 'eager'" in note for note in report["notes"])
    model = comparison.pretrained.model
    assert model.config._attn_implementation == "sdpa"


def test_steps_of_a_decoder_are_measured_and_are_not_called_exact(settings, registered, tmp_path):
    registered("no-values", without_values)
    comparison = measure(settings("llama", "no-values", methods=("clustered-tail",), new_tokens=4), tmp_path)
    report = report_of(comparison)
    (row,) = (method for method in report["methods"] if method["method"] == "attention:no-values")
    assert all(kl > 1e-3 for kl in row["step_kl"].values())
    assert "except those of attention:no-values" in report["requests"]["steps"]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("egaer", r"transformers has no attention 'egaer'; did you mean 'eager'\?"),
        ("subquad:local", r"--attention subquad:local is subquad's own; name its method in --methods"),
        ("flash_attention_2", r"--attention flash_attention_2 cannot run in .*"),
        ("doubling", r"--attention doubling changes .* for good"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(settings, registered, tmp_path, attention, message):
    registered("doubling", doubling_weights)
    with pytest.raises(InputError, match=message):
        prepare(settings("bert", attention), tmp_path)


def test_the_models_own_attention_is_back_after_an_error(settings, registered, tmp_path, monkeypatch):
    def failing(*_, **__):
        raise NotImplementedError("not on this device")

    registered("failing", failing)
    pretrained = load(settings("bert").model)
    monkeypatch.setattr("subquad.tools.compare.run.load", lambda *_: pretrained)
    with pytest.raises(InputError, match=r"--attention failing cannot run in .*: not on this device"):
        prepare(settings("bert", "failing"), tmp_path)
    assert pretrained.model.config._attn_implementation == "sdpa"


def other(name, fidelity, speedup):
    return row(f"attention:{name}", fidelity, speedup) | {"status": "other", "settings": {"name": "full"}}


def test_one_that_is_faster_than_the_choice_is_named_in_the_reasons():
    methods = [EXACT, row("clustered", 0.995, 1.5), other("fast", 0.999, 2.0), other("slow", 1.0, 1.2)]
    advice = recommend(methods, [512], 0.99)
    assert advice["choice"] == "clustered"
    (reason,) = (reason for reason in advice["reasons"] if "not subquad's" in reason)
    assert "attention:fast" in reason
    assert "slow" not in reason
    assert "1 setting of 1 method was tried" in advice["reasons"][-1]


@pytest.mark.parametrize("others", [[], [other("far", 0.5, 9.0)]])
def test_one_that_is_far_from_exact_attention_is_not(others):
    advice = recommend([EXACT, row("clustered", 0.995, 1.5), *others], [512], 0.99, 9_000)
    assert not any("not subquad's" in reason for reason in advice["reasons"])
