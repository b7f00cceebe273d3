"""accelerate's hooks around forward passes: a method swapped in first runs below them; later it would bypass them."""

import pytest
import torch
import transformers
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import remove_hook_from_module
from torch import nn

import subquad as sq
from subquad.testing.oracle import normal
from tests.library.nn.test_swapping import ROUGH, encoder
from tests.tools.workflows.tiny import BERT

WRAPPERS = {"offloaded": cpu_offload, "dispatched": lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True)}
every_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def bert() -> transformers.BertModel:
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**BERT)).eval()


@every_wrapper
def test_a_swapped_module_runs_its_method_when_it_is_wrapped(wrap):
    x, model, want = normal(2, 9, 12), encoder(), encoder()
    sq.nn.swap(want, ROUGH)
    sq.nn.swap(model, ROUGH)
    wrap(model)
    torch.testing.assert_close(model(x), want(x))
    assert not torch.allclose(model(x), encoder()(x), atol=1e-3)


@every_wrapper
def test_layers_that_are_wrapped_already_are_refused_by_name(wrap):
    model = encoder()
    wrap(model)
    before = model.layers[0].self_attn.forward
    with pytest.raises(ValueError, match=r"layer 'layers.0.self_attn' cannot run .* swap first, and wrap the swapped"):
        sq.nn.swap(model, ROUGH)
    assert model.layers[0].self_attn.forward is before


def test_layers_that_were_wrapped_since_keep_their_wrapper():
    model, x = encoder(), normal(2, 9, 12)
    sq.nn.swap(model, ROUGH)
    cpu_offload(model)
    want = model(x)
    for change in (sq.nn.restore, lambda module: sq.nn.swap(module, "full")):
        with pytest.raises(ValueError, match=r"'layers.0.self_attn' .*wrapped by another library"):
            change(model)
        torch.testing.assert_close(model(x), want)
    remove_hook_from_module(model, recurse=True)
    sq.nn.restore(model)
    torch.testing.assert_close(model(x), encoder()(x))


@every_wrapper
def test_a_swapped_transformers_model_runs_its_method_when_it_is_wrapped(wrap):
    ids, model, want = torch.arange(5, 45)[None], bert(), bert()
    for each in (model, want):
        sq.hf.swap(each, "clustered:clusters=4")
    wrap(model)
    torch.testing.assert_close(model(ids)[0], want(ids)[0])


def test_a_dispatched_transformers_model_is_swapped_and_an_offloaded_one_is_refused():
    ids, model, want = torch.arange(5, 45)[None], bert(), bert()
    WRAPPERS["dispatched"](model)
    for each in (model, want):
        sq.hf.swap(each, "clustered:clusters=4")
    torch.testing.assert_close(model(ids)[0], want(ids)[0])
    sq.hf.restore(model)
    torch.testing.assert_close(model(ids)[0], bert()(ids)[0])
    offloaded: nn.Module = cpu_offload(bert())
    with pytest.raises(ValueError, match="swap first and offload the swapped model"):
        sq.hf.swap(offloaded, "clustered:clusters=4")
