"""The file of a plan: saved, read again, edited, from elsewhere, for another model."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
import transformers

import subquad as sq
from subquad.core.environment import hardware, versions
from subquad.hf.plans import joined
from tests.tools.workflows.planning.test_measure import inputs, sharp

pytestmark = pytest.mark.slow  # whole runs of a plan


FOUND = {"floor": 0.9, "fidelity": 0.95, "bound": 0.93, "confidence": 0.95, "passages": 8, "speedup": 1.4}


def made(model):
    layers = {0: sq.ByLength({0: "full", 9: "local:window=2"}), 1: sq.Full()}
    return sq.Plan(sq.hf.adapters.describe_model(model), (20,), layers, {"20": FOUND}, {"command": "here"})


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
    ({"layers": {"7": {"name": "full"}}}, "a method for layer '7', but the model has layers 0 to 1"),
    ({"layers": {"00": {"name": "full"}}}, "a method for layer '00', but"),
    ({"layers": {"9" * 5000: {"name": "full"}}}, "a method for layer '99999999999999999999', but"),
    ({"layers": {"0": 3}}, "the method of layer 0 is '3'"),
    ({"layers": []}, "its 'layers' is '[]'"),
    ({"format": 9}, "has format 9, but this version reads 1"),
    ({"lengths": [-3]}, "its lengths are [-3]"),
    ({"model": {}}, "it does not name its model"),
    ({"model": {"class": "B", "layers": [[4, 4, 8], [4, 8]]}}, "the heads, key heads and width of layer 1 are [4, 8]"),
    ({"verified": {"20": {"fidelity": "high"}}}, "what it verified at 20 tokens is {'fidelity': 'high'}"),
    ({"verified": {"20": FOUND | {"fidelity": float("nan")}}}, "what it verified at 20 tokens is {'floor'"),
    ({"verified": {"20": 3}}, "what it verified at 20 tokens is 3"),
    ({"verified": {"20": FOUND | {"baseline": [3]}}}, "what it verified at 20 tokens is {'floor'"),
    ({"verified": {"20": FOUND | {"batches": {"batch": 8}}}}, "what it verified at 20 tokens is {'floor'"),
])  # fmt: skip
def test_plans_that_are_none_are_refused_in_one_line(changes, message, tmp_path):
    made(sharp("bert")).save(tmp_path)
    with pytest.raises(ValueError, match=r"plan\.json") as error:
        sq.load_plan(edited(tmp_path, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_plan_from_elsewhere_says_where_it_was_made(tmp_path):
    plan = replace(made(sharp("bert")), made_on={"versions": versions() | {"torch": "1.0"}, "hardware": hardware()})
    plan.save(tmp_path)
    with pytest.warns(UserWarning, match="plan.json was made with torch 1.0, but this is torch") as said:
        assert sq.load_plan(tmp_path) == plan
    assert len(said) == 1
    made_on = {
        "versions": versions() | {"matplotlib": "9"},
        "hardware": hardware() | {"processor": "Abacus", "gpu": "H"},
    }
    replace(plan, made_on=made_on).save(tmp_path)
    with pytest.warns(UserWarning, match="processor Abacus, gpu H, but this is processor .*, gpu "):
        sq.load_plan(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replace(plan, made_on={"versions": versions(), "hardware": hardware()}).save(tmp_path)
        sq.load_plan(tmp_path)
        replace(plan, made_on={"hardware": "mine"}).save(tmp_path)
        sq.load_plan(tmp_path)


@pytest.mark.parametrize(("sizes", "message"), [
    ({"num_hidden_layers": 3}, "2 attention layers of 4 heads .4 for keys. of width 8, but this is a BertModel with 3"),
    ({"hidden_size": 64}, "but this is a BertModel with 2 attention layers of 4 heads .4 for keys. of width 16"),
    ({"num_attention_heads": 2}, "but this is a BertModel with 2 attention layers of 2 heads .2 for keys. of width 16"),
])  # fmt: skip
def test_a_plan_for_other_layers_is_refused_and_the_model_is_as_it_was(sizes, message):
    plan = made(sharp("bert"))
    shape = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.BertModel(transformers.BertConfig(**shape | {"intermediate_size": 48} | sizes))
    with pytest.raises(ValueError, match=message):
        sq.hf.swap(model, plan)
    assert not sq.hf.bounds(model)


@pytest.fixture
def learned(tmp_path):
    """A model, and the folder of a plan of which layer 1 has learned parameters."""
    model = sharp("bert")
    bound = sq.hf.bind(sq.hf.find_layers(model)[1], "lha:buckets=2,hidden=4")
    layers = {0: sq.Local(window=3), 1: bound.method}
    sq.Plan(sq.hf.adapters.describe_model(model), (20,), layers, {}, {}, {1: bound}).save(tmp_path / "plan", model)
    return model, tmp_path / "plan"


def test_a_plan_without_its_learned_parameters_is_refused(learned):
    _, folder = learned
    (folder / "adapter.json").unlink()
    with pytest.raises(
        ValueError, match=r"plan.json: the learned parameters of layer 1, lha:buckets=2.*no adapter.json"
    ):
        sq.load_plan(folder)


@pytest.mark.filterwarnings("ignore:.*was edited since")
def test_what_is_edited_goes_before_the_adapter_and_what_it_lacks_is_refused(learned):
    model, folder = learned
    plan = sq.load_plan(edited(folder, layers={"0": {"name": "full"}, "1": {"name": "local", "window": 2}}))
    assert sq.hf.swap(model, plan).methods == {0: sq.Full(), 1: sq.Local(window=2)}
    with pytest.raises(
        ValueError, match="layer 1 runs lha:buckets=5, but the adapter next to it has lha:buckets=2,hidden=4"
    ):
        sq.load_plan(edited(folder, layers={"1": {"name": "lha", "buckets": 5}}))
    with pytest.raises(ValueError, match=r"layer 0 runs lha.*, but the adapter next to it has nothing for it"):
        sq.load_plan(edited(folder, layers={"0": {"name": "lha"}}))


def test_a_plan_that_was_read_is_saved_with_its_learned_parameters(learned, tmp_path):
    model, folder = learned
    plan = sq.load_plan(folder)
    with pytest.raises(ValueError, match="the plan has learned parameters, which are saved for a model"):
        plan.save(tmp_path / "copy")
    again = sq.load_plan(plan.save(tmp_path / "copy", model))
    assert again == plan
    for name, tensor in plan.adapter.tensors[1].items():
        assert torch.equal(again.adapter.tensors[1][name], tensor)


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
