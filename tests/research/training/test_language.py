"""The causal language model: nothing of the future in the past, generation with every cache, save and load."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

import subquad as sq
from subquad.nn.auxiliary import has_auxiliary_loss, with_auxiliary_loss
from subquad.research.training.models.language import CausalLanguageModel, LanguageConfig

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 48}
MIXED = "mixed-heads:methods=local:positions=relative;window=4+lha:buckets=3;hidden=8;selection=argmax"
RECURRENT = (
    "linear",
    "performer:features=16",
    "rfa:features=16",
    "learned-feature-map:features=8,window=4,sinks=1",
    "linformer:k=4",
)
STEPPING = ("full", "local:window=4,positions=relative", *RECURRENT)
WITHOUT_STEPS = ("lha:buckets=3,hidden=8,selection=argmax", "lsh:buckets=3,selection=argmax", MIXED)
PLACED = [  # each kind of positions, and methods that learn something of their own
    *(("full", positions) for positions in ("learned", "sinusoidal", "layer-sinusoidal", "rotary", "none")),
    *((method, "rotary") for method in (*RECURRENT, *WITHOUT_STEPS)),
    (MIXED, "layer-sinusoidal"),
    ("local:window=4,positions=relative", "none"),
]
LEARNING = [*PLACED[:5], *PLACED[-3:]]


def build(method="full", positions="rotary", seed=0, **more) -> CausalLanguageModel:
    """A model with weights large enough that attention matters."""
    torch.manual_seed(seed)
    options = SIZES | {"method": method, "positions": positions, "initializer_range": 0.2} | more
    return CausalLanguageModel(LanguageConfig(**options)).eval()


def text(batch=2, length=20, seed=1):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def generated(model, ids, **options):
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    } | options
    return model.generate(ids, **options)


def same(have, want):
    assert torch.equal(have.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(have.logits), torch.stack(want.logits), atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------- causality and learning


@pytest.mark.parametrize(("method", "positions"), PLACED)
def test_the_future_changes_nothing_before_it(method, positions):
    model, ids = build(method, positions), text()
    other = ids.clone()
    other[:, 13:] = text(2, 7, seed=2)
    before, after = model(ids).logits, model(other).logits
    torch.testing.assert_close(after[:, :13], before[:, :13], atol=1e-5, rtol=1e-5)
    assert (after[:, 13:] - before[:, 13:]).abs().max() > 0.1
    torch.testing.assert_close(model(ids[:, :13]).logits, before[:, :13], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("method", "positions"), LEARNING)
def test_a_few_steps_learn_a_text(method, positions):
    model, ids = build(method, positions, initializer_range=0.02).train(), text(4, 16)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        total = with_auxiliary_loss(loss, model) if has_auxiliary_loss(model) else loss
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "layer-sinusoidal", "rotary", "none"])
def test_order_matters_to_one_layer_by_its_positions_alone(positions):
    model, ids = build("full", positions, num_hidden_layers=1), text(1, 12)
    turned = ids[:, [*range(10, -1, -1), 11]]
    change = (model(turned).logits[0, -1] - model(ids).logits[0, -1]).abs().max()
    assert change < 1e-5 if positions == "none" else change > 1e-2


def test_heads_of_odd_width_take_all_positions_but_rotary():
    odd = {"hidden_size": 36, "num_attention_heads": 4}  # Transformer-XL's are 41 wide
    model, ids = build("full", "layer-sinusoidal", num_hidden_layers=1, **odd), text(1, 12)
    turned = ids[:, [*range(10, -1, -1), 11]]
    assert (model(turned).logits[0, -1] - model(ids).logits[0, -1]).abs().max() > 1e-2
    with pytest.raises(StrictDataclassClassValidationError, match="need heads of even width, but theirs is 9"):
        build("full", "rotary", **odd)


@pytest.mark.parametrize("method", ["i-clustered:clusters=4", "lha:buckets=3", "lsh:buckets=3"])
def test_methods_that_look_ahead_are_refused(method):
    with pytest.raises(ValueError, match="the future"):
        build(method)


def test_the_loss_is_the_mean_over_items_of_what_the_next_label_costs():
    model, ids = build(), text()
    labels = ids.clone()
    labels[1, 6:] = -100
    out = model(ids, labels=labels)
    chances = out.logits.log_softmax(-1)
    first = -chances[0, :-1].gather(1, ids[0, 1:, None]).mean()
    second = -chances[1, :5].gather(1, ids[1, 1:6, None]).mean()
    torch.testing.assert_close(out.loss, (first + second) / 2)


# ---------------------------------------------------------------------- generation


@pytest.mark.parametrize("method", STEPPING)
def test_greedy_is_the_same_with_every_cache(method):
    model, ids = build(method), text()
    assert model.takes_steps
    want = generated(model, ids, use_cache=False)
    same(generated(model, ids), want)
    same(generated(model, ids, cache_implementation="static"), want)
    if sq.hf.bounds(model)[0].method.traits.recurrent:
        same(generated(model, ids, past_key_values=sq.hf.StateCache(model)), want)


@pytest.mark.parametrize("method", RECURRENT)
def test_steps_on_a_state_say_what_one_pass_says(method):
    model, ids = build(method), text()
    cache = sq.hf.StateCache(model)
    steps = [model(ids[:, t : t + 1], past_key_values=cache).logits for t in range(ids.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", WITHOUT_STEPS)
def test_methods_without_steps_generate_without_a_cache(method):
    model, ids = build(method), text()
    assert not model.takes_steps
    have = generated(model, ids)
    same(have, generated(model, ids, use_cache=False))
    assert torch.equal(have.sequences[:, 20], model(ids).logits[:, -1].argmax(-1))
    with pytest.raises(ValueError, match="cache"):
        generated(model, ids, use_cache=True)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "layer-sinusoidal", "rotary", "none"])
@pytest.mark.parametrize("method", ["full", "linear", MIXED])
def test_padding_on_the_left_changes_nothing(method, positions):
    model, ids = build(method, positions), text()
    real = torch.ones_like(ids)
    real[1, :8] = 0
    alone = generated(model, ids[1:, 8:])
    together = generated(model, ids, attention_mask=real)
    assert torch.equal(together.sequences[1, 20:], alone.sequences[0, 12:])
    torch.testing.assert_close(together.logits[-1][1], alone.logits[-1][0], atol=1e-4, rtol=1e-4)
    plain = model(ids, attention_mask=real).logits[1, 8:]  # without position_ids, too
    torch.testing.assert_close(plain, model(ids[1:, 8:]).logits[0], atol=1e-4, rtol=1e-4)


def test_padding_on_the_right_changes_nothing():
    model, ids = build("linear"), text()
    real = torch.ones_like(ids)
    real[1, 11:] = 0
    labels = torch.where(real.bool(), ids, -100)
    whole = model(ids, attention_mask=real, labels=labels)
    torch.testing.assert_close(whole.logits[1, :11], model(ids[1:, :11]).logits[0], atol=1e-5, rtol=1e-5)
    each = [model(ids[:1], labels=ids[:1]).loss, model(ids[1:, :11], labels=ids[1:, :11]).loss]
    torch.testing.assert_close(whole.loss, torch.stack(each).mean())


def test_beams_and_restored_attention():
    model, ids = build("linear"), text()
    want = model.generate(ids, max_new_tokens=5, num_beams=3, use_cache=False, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=5, num_beams=3, do_sample=False), want)
    sq.hf.restore(model)
    same(generated(model, ids), generated(model, ids, use_cache=False))
    torch.testing.assert_close(model(ids).logits, build("full")(ids).logits, atol=1e-4, rtol=1e-4)


def test_learned_positions_end():
    model = build("linear", "learned")
    with pytest.raises(ValueError, match="this is token 49, but the model has 48 learned positions"):
        model(text(1, 49))
    with pytest.raises(ValueError, match="this is token 49, but the model has 48 learned positions"):
        model.generate(text(1, 47), max_new_tokens=5, do_sample=False)


# ---------------------------------------------------------------------- tables, save and load


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_or_not(tied):
    model = build(tie_word_embeddings=tied)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert sum(p.numel() for p in model.parameters()) == build().num_parameters() + (0 if tied else 258 * 32)


@pytest.mark.parametrize(
    ("method", "tied"),
    [(MIXED, True), (MIXED, False), ("lha:buckets=3,hidden=8,selection=argmax", True), ("linformer:k=4", True)],
)
def test_a_saved_model_comes_back_bit_for_bit(method, tied, tmp_path):
    model, ids = build(method, tie_word_embeddings=tied).train(), text()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)  # so that what is learned is not what it starts with
    loss = model(ids, labels=ids).loss
    (with_auxiliary_loss(loss, model) if has_auxiliary_loss(model) else loss).backward()
    optimiser.step()
    model.eval().save_pretrained(tmp_path)
    back = CausalLanguageModel.from_pretrained(tmp_path)
    kept, found = model.state_dict(), back.state_dict()
    assert kept.keys() == found.keys()
    assert all(torch.equal(kept[name], found[name]) for name in kept)
    assert torch.equal(back(ids).logits, model(ids).logits)
    same(generated(back, ids), generated(model, ids))
