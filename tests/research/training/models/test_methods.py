"""Every method in every encoder: it learns, and a saved model is the same model."""

import pytest
import torch

import subquad as sq
from subquad.methods import METHODS as REGISTERED
from subquad.nn.auxiliary import auxiliary_loss, has_auxiliary_loss
from subquad.research.training.models import EncoderClassifier, EncoderConfig, MaskedSymbolEncoder
from tests.research.training.models.build import (
    KINDS,
    METHODS,
    SMALL,
    a_few_steps,
    assert_same_state,
    batch_for,
    build,
    symbols,
    whole_loss,
)

WITH_AUXILIARY = ("lha", "lha-tail", "mixed-heads")
# What these methods have no use for: keys of their own, and what only causal attention forgets by.
IDLE = dict.fromkeys(("shared-full", "reformer", "routing"), ("k_proj",)) | {
    "rfa": ("bound.learned.weight", "bound.learned.bias")
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def test_no_method_is_left_out():
    assert SMALL.keys() == REGISTERED.keys()


@pytest.mark.covering(strength=1)
@every_kind
@every_method
def test_gradients_are_finite_and_reach_all_that_learns(kind, method):
    model, batch = build(kind, method).train(), batch_for(kind)
    whole_loss(model, batch).backward()
    idle = IDLE.get(method.split(":")[0], ())
    for name, parameter in model.named_parameters():
        if any(part in name for part in idle):
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or "k_proj.bias" in name, name  # softmax does not see a shift of all keys


@every_method
def test_a_few_steps_learn(method):
    losses = a_few_steps(build(MaskedSymbolEncoder, method, initializer_range=0.05), batch_for(MaskedSymbolEncoder), 8)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.covering(strength=1)
@every_kind
@every_method
def test_a_saved_model_comes_back_bit_for_bit(kind, method, tmp_path):
    model, batch = build(kind, method), batch_for(kind)
    a_few_steps(model, batch)
    model.save_pretrained(tmp_path)
    back = kind.from_pretrained(tmp_path)
    assert_same_state(model, back)
    assert sq.hf.describe(back).methods == sq.hf.describe(model).methods
    assert torch.equal(back(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("method", [METHODS["routing"], METHODS["performer"]])
def test_what_follows_the_training_goes_on_where_it_was(method, tmp_path):
    model, batch = build(MaskedSymbolEncoder, method), batch_for(MaskedSymbolEncoder)
    a_few_steps(model, batch)
    model.save_pretrained(tmp_path)
    back = MaskedSymbolEncoder.from_pretrained(tmp_path)
    a_few_steps(model, batch)
    a_few_steps(back, batch)
    assert_same_state(model, back)
    fresh = build(MaskedSymbolEncoder, method)
    followed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, fresh.get_buffer(name))]
    assert followed


# ---------------------------------------------------------------------- which layer, which heads


def test_a_method_for_each_layer(tmp_path):
    methods = ["i-clustered:clusters=3,topk=4", METHODS["lha"]]
    model = build(method=methods)
    assert [str(m) for m in sq.hf.describe(model).methods.values()] == methods
    model.save_pretrained(tmp_path)
    assert EncoderConfig.from_pretrained(tmp_path).method == methods
    assert torch.equal(EncoderClassifier.from_pretrained(tmp_path)(symbols()).logits, model(symbols()).logits)


@pytest.mark.parametrize(("methods", "message"), [
    (["full"], "method has 1 methods, but the model has more attention layers"),
    (["full"] * 3, "3 methods are given, but the model has 2 attention layers"),
])  # fmt: skip
def test_methods_must_be_as_many_as_layers(methods, message):
    with pytest.raises(ValueError, match=message):
        build(method=methods)


def test_a_method_for_each_group_of_heads():
    mixed, local = build(method="mixed-heads:methods=local:window=3+full"), build(method="local:window=3")
    exact, ids = build(), symbols()
    assert not torch.allclose(mixed(ids).logits, exact(ids).logits, atol=1e-4)
    assert not torch.allclose(mixed(ids).logits, local(ids).logits, atol=1e-4)
    alike = build(method="mixed-heads:methods=full+oracle-top:topk=20")  # as many keys as there are
    torch.testing.assert_close(alike(ids).logits, exact(ids).logits, atol=1e-5, rtol=1e-5)


def test_an_unknown_method_is_named():
    with pytest.raises(ValueError, match="did you mean 'i-clustered'"):
        build(method="i-clusterd")


@every_method
def test_grouped_query_heads(method):
    model, batch = build(method=method, num_attention_heads=4, num_key_value_heads=2), batch_for(EncoderClassifier)
    assert model.encoder.stack.blocks[0].attention.k_proj.weight.shape == (8, 16)
    whole_loss(model.train(), batch).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.encoder.stack.blocks[0].attention.v_proj.weight.grad.any()


# ---------------------------------------------------------------------- losses


@pytest.mark.parametrize("method", [METHODS[name] for name in WITH_AUXILIARY], ids=WITH_AUXILIARY)
def test_the_task_and_the_auxiliary_loss_do_not_touch_each_others_parameters(method):
    model, batch = build(method=method).train(), batch_for(EncoderClassifier)
    loss = model(**batch).loss
    auxiliary = auxiliary_loss(model)
    both = {}
    for name, part in (("task", loss), ("auxiliary", auxiliary)):
        found = torch.autograd.grad(part, list(model.parameters()), allow_unused=True, retain_graph=True)
        both[name] = {p for (p, _), g in zip(model.named_parameters(), found, strict=True) if g is not None and g.any()}
    assert both["task"]
    assert both["auxiliary"]
    assert not both["task"] & both["auxiliary"]
    torch.testing.assert_close(sq.nn.with_auxiliary_loss(1.0 * loss, _ran(model, batch), 0.25),
                               0.75 * loss + 0.25 * auxiliary)  # fmt: skip


def _ran(model, batch):
    """With an auxiliary loss to be taken."""
    model(**batch)
    return model


@every_method
def test_only_hash_functions_and_spans_have_an_auxiliary_loss(method):
    assert has_auxiliary_loss(build(method=method)) == (method.split(":")[0] in (*WITH_AUXILIARY, "adaptive-span"))


@pytest.mark.parametrize("method", ["full", METHODS["i-clustered"], METHODS["lha"]])
def test_attention_dropout_is_for_training_alone(method):
    model, ids = build(method=method, attention_dropout=0.5), symbols()
    assert torch.equal(model(ids).logits, model(ids).logits)
    torch.manual_seed(0)
    first = model.train()(ids).logits
    assert not torch.allclose(model(ids).logits, first)
    torch.manual_seed(0)
    assert torch.equal(model(ids).logits, first)
    assert torch.equal(model.eval()(ids).logits, build(method=method)(ids).logits)
