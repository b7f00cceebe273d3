"""The encoders: what padding, pairs, pooling and labels do, and what transformers and `sq.hf` can do with them."""

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification

import subquad as sq
from subquad.research.training.models import EncoderClassifier, MaskedSymbolEncoder
from subquad.research.training.models.configuration import POSITIONS
from subquad.tools.measure.capture import recorded
from tests.forks import output_of
from tests.research.training.models.build import (
    KINDS,
    METHODS,
    a_few_steps,
    assert_same_state,
    batch_for,
    build,
    symbols,
)

LENGTHS = (20, 7, 13)
every_kind = pytest.mark.parametrize("kind", KINDS)


def padded(width, filler):
    """Items of these lengths, and after each one `filler`."""
    ids = symbols(3, 20)
    real = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    ids = torch.cat([ids, ids.new_full((3, width - 20), 0)], dim=1)
    return torch.where(real, ids, torch.as_tensor(filler)), real.long()


def close(have, want):
    torch.testing.assert_close(have, want, atol=2e-5, rtol=1e-4)


# ---------------------------------------------------------------------- padding


@every_kind
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_padding_changes_neither_outputs_nor_losses_nor_gradients(kind, method):
    if "redraw" in method:
        method = "performer:features=8"  # which draws features anew as it trains, padding or not
    found = []
    for width, filler in ((20, 0), (20, 5), (26, torch.arange(26) % 20)):
        model = build(kind, method).train()
        ids, real = padded(width, filler)
        labels = torch.tensor([0, 1, 2]) if kind is EncoderClassifier else torch.where(real.bool(), ids, -100)
        out = model(ids, attention_mask=real, labels=labels)
        out.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        logits = out.logits if kind is EncoderClassifier else out.logits[:, :20][real[:, :20].bool()]
        found.append((logits, out.loss, gradients))
    for other in found[1:]:
        close(other[0], found[0][0])
        close(other[1], found[0][1])
        for name, gradient in found[0][2].items():
            close(other[2][name] / (1 + gradient.abs().max()), gradient / (1 + gradient.abs().max()))


@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_an_item_is_the_same_alone_and_in_a_batch(positions, pooling):
    model = build(positions=positions, pooling=pooling)
    ids, real = padded(24, 3)
    together = model(ids, attention_mask=real).logits
    alone = [model(ids[i : i + 1, :n]).logits[0] for i, n in enumerate(LENGTHS)]
    close(together, torch.stack(alone))


def test_padding_of_pairs():
    model = build(pairs=True, method="i-clustered:clusters=3,topk=4")
    (a, first), (b, second) = padded(20, 0), padded(26, 5)
    together = model(a, attention_mask=first, pair_ids=b.flip(0), pair_mask=second.flip(0)).logits
    alone = [
        model(a[i : i + 1, :n], pair_ids=b[2 - i : 3 - i, : LENGTHS[2 - i]]).logits[0] for i, n in enumerate(LENGTHS)
    ]
    close(together, torch.stack(alone))


# ---------------------------------------------------------------------- losses, pairs


def test_pairs_are_for_models_of_pairs():
    ids = symbols()
    with pytest.raises(ValueError, match=r"reads single sequences .*pairs=False.*, but pairs were given"):
        build()(ids, pair_ids=ids)
    with pytest.raises(ValueError, match=r"reads pairs .*pairs=True.*, but single sequences were given"):
        build(pairs=True)(ids)


def test_the_classifiers_loss_is_the_cross_entropy():
    model, batch = build(), batch_for(EncoderClassifier)
    out = model(**batch)
    chances = out.logits.log_softmax(-1)
    close(out.loss, -torch.stack([chances[i, label] for i, label in enumerate(batch["labels"])]).mean())
    assert model(batch["input_ids"]).loss is None


def test_every_item_counts_the_same_however_many_places_it_has():
    model, ids = build(MaskedSymbolEncoder), symbols(3)
    labels = torch.full_like(ids, -100)
    labels[0, :9], labels[1, 4] = ids[0, :9], ids[1, 4]  # the third has none
    out = model(ids, labels=labels)
    chances = out.logits.log_softmax(-1)
    first = -chances[0, :9].gather(1, ids[0, :9, None]).mean()
    second = -chances[1, 4, ids[1, 4]]
    close(out.loss, (first + second) / 3)


# ---------------------------------------------------------------------- other attention in them


@every_kind
def test_layers_are_found_and_described(kind):
    model = build(kind, "i-clustered:clusters=3", num_attention_heads=4, num_key_value_heads=2)
    layers = sq.hf.find_layers(model)
    assert [layer.name for layer in layers] == [f"encoder.stack.blocks.{i}.attention" for i in range(2)]
    assert {layer.kind for layer in layers} == {"self-attention"}
    assert sq.hf.head_counts(layers[0].module) == (4, 2, 4)
    assert "i-clustered:clusters=3" in str(sq.hf.describe(model))


def test_restored_is_exact_attention():
    model, ids = build(method="i-clustered:clusters=3,topk=4"), symbols()
    approximate = model(ids).logits
    sq.hf.restore(model)
    assert not sq.hf.describe(model).methods
    assert model.config._attn_implementation == "sdpa"
    exact = model(ids).logits
    assert not torch.allclose(exact, approximate, atol=1e-4)
    close(exact, build()(ids).logits)
    masked = torch.ones_like(ids)
    masked[0, 5:] = 0
    close(model(ids, attention_mask=masked).logits, build()(ids, attention_mask=masked).logits)


@pytest.mark.parametrize("method", [METHODS["clustered"], METHODS["lha"], METHODS["routing"]])
def test_what_is_swapped_in_is_saved_and_comes_back(method, tmp_path):
    model, batch = build(MaskedSymbolEncoder, "linear"), batch_for(MaskedSymbolEncoder)
    sq.hf.swap(model, {1: method})
    a_few_steps(model, batch)
    model.save_pretrained(tmp_path)
    back = MaskedSymbolEncoder.from_pretrained(tmp_path)
    assert [str(m) for m in sq.hf.describe(back).methods.values()] == ["full", method]
    assert_same_state(model, back)
    assert torch.equal(back(**batch).logits, model(**batch).logits)


def test_restored_and_saved_it_comes_back_with_exact_attention(tmp_path):
    model, ids = build(method=METHODS["lha"]), symbols()
    sq.hf.restore(model)
    model.save_pretrained(tmp_path)
    assert not sq.hf.describe(model).methods
    back = EncoderClassifier.from_pretrained(tmp_path)
    assert {str(m) for m in sq.hf.describe(back).methods.values()} == {"full"}
    close(back(ids).logits, model(ids).logits)


@pytest.mark.parametrize("method", [METHODS["lha"], METHODS["linformer"], METHODS["routing"]])
def test_recording_leaves_a_model_as_it_was(method):
    model, batch = build(method=method), batch_for(EncoderClassifier)
    a_few_steps(model, batch)
    before, want = {name: p.clone() for name, p in model.state_dict().items()}, model(**batch).logits
    with recorded(model) as calls:
        model(**batch)
    assert [call.number for call in calls] == [0, 1]
    assert calls[0].query.shape == (2, 2, 20, 8)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert torch.equal(model(**batch).logits, want)


# ---------------------------------------------------------------------- transformers


def test_the_encoder_of_a_classifier_loads_without_its_head(tmp_path):
    model = build(EncoderClassifier, method="clustered:clusters=4").eval()
    model.save_pretrained(tmp_path)
    encoder, loading = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"]
    ids = symbols()
    assert torch.equal(encoder(ids).last_hidden_state, model.encoder(ids, None))
    assert encoder.get_input_embeddings().weight.shape == model.encoder.embedding.weight.shape
    assert str(sq.hf.describe(encoder).methods[0]) == "clustered:clusters=4"


@pytest.mark.parametrize(("auto", "kind"), [
    (AutoModelForSequenceClassification, EncoderClassifier), (AutoModelForMaskedLM, MaskedSymbolEncoder)
])  # fmt: skip
def test_auto_classes_load_them(auto, kind, tmp_path):
    model = build(kind, METHODS["lha"])
    model.save_pretrained(tmp_path)
    back = auto.from_pretrained(tmp_path)
    assert type(back) is kind
    assert torch.equal(back(symbols()).logits, model(symbols()).logits)


def test_gradient_checkpointing_is_refused():
    with pytest.raises(ValueError, match=r"EncoderClassifier does not support .* checkpointing"):
        build().gradient_checkpointing_enable()


@pytest.mark.parametrize("method", ["full", METHODS["clustered"]])
def test_bfloat16(method):
    model, batch = build(method=method).to(torch.bfloat16), batch_for(EncoderClassifier)
    out = model(**batch)
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.long
def test_compiled_models_have_the_same_loss_and_gradients():
    output_of("tests.research.training.models.compiled")
