"""Tests of refusals at a swapped model's boundary: an implementation set behind its back, and attention weights."""

import copy
import inspect
import pickle
from contextlib import contextmanager

import pytest
import torch
import transformers as hf
from accelerate.hooks import ModelHook, add_hook_to_module

import subquad as sq
from subquad.hf.forward_wrappers import positional_names, wrap_forward
from tests.library.hf.models import TEXT, build, padded_ids

METHOD = "clustered:clusters=3"
CHANGED = r"layer \d \(.*\) of this \w+ runs '.*' since sq\.hf\.swap, but attn_implementation='{}' was set"


@contextmanager
def putting_back(config):
    """Like a library that runs a model on another attention for a while."""
    before = config._attn_implementation
    yield
    config._attn_implementation = before


def by_context_manager(model) -> None:
    sq.hf.restore(model)
    with putting_back(model.config):
        sq.hf.swap(model, METHOD)


def by_attribute(model) -> None:
    model.config._attn_implementation = "eager"


def by_method(model) -> None:
    model.set_attn_implementation("eager")


def by_other_config(model) -> None:
    model.config = type(model.config)(**model.config.to_dict() | {"attn_implementation": "eager"})


@pytest.mark.parametrize("way", ["pickle", "accelerate"])
def test_models_in_another_process_or_with_a_hook_of_accelerate_are_checked(way, monkeypatch):
    model, plain = build("bert").model, inspect.unwrap(hf.BertModel.forward)
    monkeypatch.setattr(hf.BertModel, "forward", plain)
    if way == "accelerate":
        add_hook_to_module(model, ModelHook())
    sq.hf.swap(model, METHOD)
    if way == "pickle":
        pickled = pickle.dumps(model)
        monkeypatch.setattr(hf.BertModel, "forward", plain)
        model = pickle.loads(pickled)
    ids, mask = padded_ids()
    model(input_ids=ids, attention_mask=mask)
    with pytest.raises(ValueError, match="asks for attention weights"):
        model(input_ids=ids, attention_mask=mask, output_attentions=True)


@pytest.mark.parametrize("change", [by_context_manager, by_attribute, by_method, by_other_config])
def test_another_implementation_set_behind_a_swap_is_noticed(change, tmp_path):
    case = build("bert")
    own = case.output()
    sq.hf.swap(case.model, METHOD)
    want = case.output()
    change(case.model)
    for use in (case.output, lambda: case.model.save_pretrained(tmp_path)):
        with pytest.raises(ValueError, match=CHANGED.format("eager")):
            use()
    assert not list(tmp_path.iterdir())
    case.model.config._attn_implementation = sq.hf.ATTACHED
    assert torch.equal(case.output(), want)
    change(case.model)
    sq.hf.swap(case.model, METHOD)
    assert torch.equal(case.output(), want)
    change(case.model)
    sq.hf.restore(case.model)
    torch.testing.assert_close(case.output(), own)
    case.model.save_pretrained(tmp_path)


def test_it_is_noticed_in_any_part_that_is_called_alone():
    case = build("bart")
    sq.hf.swap(case.model, "full")
    case.model.config._attn_implementation = "sdpa"
    inputs = {"input_ids": case.inputs["input_ids"]}
    for part in (case.model, case.model.model, case.model.model.encoder, case.model.model.decoder):
        with pytest.raises(ValueError, match=CHANGED.format("sdpa")):
            part(**inputs)


def test_it_is_noticed_in_a_config_that_only_attention_modules_have():
    case = build("bert")
    for layer in sq.hf.find_layers(case.model):
        layer.module.config = copy.deepcopy(case.model.config)
    sq.hf.swap(case.model, METHOD)
    case.output()
    sq.hf.find_layers(case.model)[0].module.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match=CHANGED.format("eager")):
        case.output()


def test_a_restored_part_of_a_swapped_model_does_not_count():
    case = build("whisper")
    sq.hf.swap(case.model, "full")
    sq.hf.restore(case.model.get_encoder())
    case.output()
    sq.hf.swap(case.model.get_encoder(), METHOD)
    case.output()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: model])
def test_trials_run_on_purpose(copied):
    case = build("bert")
    sq.hf.swap(case.model, METHOD)
    case.model = copied(case.model)
    case.model.config.hidden_dropout_prob = 0.25  # so that another trial is made
    sq.hf.find_layers(case.model)
    case.model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match=CHANGED.format("eager")):
        case.output()


# ---------------------------------------------------------------------- attention weights


def siglip() -> hf.SiglipVisionModel:
    config = hf.SiglipVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
    )
    return hf.SiglipVisionModel(config).eval()


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "t5", "modernbert", "wav2vec2", "distilbert", "siglip"])
def test_weights_are_refused_whether_or_not_the_model_hands_the_request_on(name):
    if name == "siglip":
        model, inputs = siglip(), {"pixel_values": torch.zeros(1, 3, 32, 32)}
    else:
        case = build(name)
        model, inputs = case.model, case.inputs
    sq.hf.swap(model, "full")
    for part in (model, model.base_model):
        with pytest.raises(ValueError, match="output_attentions=True asks for attention weights, which no method"):
            part(**inputs, output_attentions=True)
        part(**inputs, output_attentions=False)


def test_weights_are_refused_by_position_too():
    class Positional(hf.BertModel):
        def forward(self, input_ids=None, attention_mask=None, output_attentions=None):
            return super().forward(input_ids=input_ids, attention_mask=attention_mask)

    model = Positional(hf.BertConfig(**TEXT)).eval()
    sq.hf.swap(model, "full")
    ids, mask = padded_ids()
    model(ids, mask)
    with pytest.raises(ValueError, match="output_attentions=True asks"):
        model(ids, mask, True)


def test_weights_that_a_config_asks_for_are_refused_before_the_swap():
    model = build("gpt2").model
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions=True in the GPT2Config asks for attention weights"):
        sq.hf.swap(model, "full")
    assert model.config._attn_implementation == "eager"
    model.config.output_attentions = False
    sq.hf.swap(model, "full")
    model.config._output_attentions = True
    with pytest.raises(ValueError, match="output_attentions=True in the GPT2Config"):
        model(input_ids=padded_ids()[0])


def test_weights_of_generated_tokens_are_refused():
    case = build("gpt2")
    sq.hf.swap(case.model, "full")
    with pytest.raises(ValueError, match="output_attentions=True asks"):
        case.model.generate(**case.inputs, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


def test_the_forward_pass_of_a_class_is_wrapped_once_for_each_mark():
    class Model:
        def forward(self, x):
            return x

    for mark in ("_first", "_second", "_first", "_second"):
        wrap_forward(Model, mark, lambda forward: lambda self, x: forward(self, x) + 1)
    assert Model().forward(0) == 2
    assert positional_names(Model.forward) == ("x",)
