"""The inputs of a model's layers."""

import pytest
import torch

import subquad as sq
from subquad.tools.measure.capture import recorded
from tests.library.hf.models import VOCAB, build


def test_every_layer_is_recorded_and_replays():
    case = build("bert")
    want = case.output()
    with recorded(case.model) as calls:
        torch.testing.assert_close(case.output(), want, atol=1e-5, rtol=1e-5)
    assert [(call.number, call.name) for call in calls] == [
        (0, "encoder.layer.0.attention.self"),
        (1, "encoder.layer.1.attention.self"),
    ]
    assert calls[0].run(sq.OracleTopK(topk=999)).allclose(calls[0].run(sq.Full()), atol=1e-5)
    assert not sq.hf.describe(case.model).methods


def test_a_swapped_model_is_swapped_again_afterwards():
    model = build("bert").model
    sq.hf.swap(model, "clustered:clusters=3")
    with recorded(model):
        assert str(sq.hf.describe(model).methods[0]) == "full"
    assert str(sq.hf.describe(model).methods[0]) == "clustered:clusters=3"


def test_what_is_not_finite_is_named_with_its_layer():
    case = build("bert")
    case.model.encoder.layer[1].attention.self.value.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"the value of attention layer 1 .* not finite"), recorded(case.model):
        case.output()
    assert not sq.hf.describe(case.model).methods


@torch.no_grad()
def test_a_recorded_call_has_the_positions_that_the_layer_has_when_swapped():
    model, ids = build("llama").model, torch.randint(5, VOCAB, (1, 43))
    method = sq.parse_method("clustered-tail:clusters=4,topk=3,cells=2,block=8,last=0,queries=earlier")
    with recorded(model) as calls:
        model(ids)
    outs = []
    sq.hf.swap(model, {0: method})
    attached = next(module for name, module in model.named_modules() if name.endswith("self_attn.subquad"))
    attached.register_forward_hook(lambda module, args, out: outs.append(out))
    model(ids)
    torch.testing.assert_close(calls[0].run(method), outs[0])
    _, heads, _, width = calls[0].query.shape
    bound = method.bind(heads=heads, kv_heads=calls[0].key.shape[1], head_dim=width)
    torch.testing.assert_close(calls[0].run(bound), outs[0])
