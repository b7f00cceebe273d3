"""Decoders with clusters of earlier queries: rotary positions reach the method, training, prefixes, what is saved."""

import pytest
import torch

import subquad as sq
from subquad.research.training.models.language import CausalLanguageModel, LanguageConfig
from subquad.research.training.models.positional_encodings import rotate
from subquad.testing.oracle import normal
from tests.library.hf.models import build
from tests.library.hf.prompts import prompt

STRICT = "clustered-tail:clusters=4,topk=3,cells=2,bits=15,iterations=3,block=8,last=0,queries=earlier"


@pytest.fixture(params=["llama", "gpt2", "qwen3", "phi"])
def model(request):
    return build(request.param).model


@torch.no_grad()
@pytest.mark.parametrize("length", [5, 8, 13, 16, 31])
def test_a_prefix_has_the_outputs_that_it_has_alone(model, length):
    sq.hf.swap(model, STRICT)
    ids = prompt(43)
    whole, prefix = model(ids).logits[:, :length], model(ids[:, :length]).logits
    torch.testing.assert_close(prefix, whole, rtol=1e-4, atol=1e-5)


def test_a_decoder_trains_and_no_gradient_comes_from_the_future(model):
    sq.hf.swap(model.train(), STRICT)
    embedded = model.get_input_embeddings()(prompt(43)).detach().requires_grad_()
    out = model(inputs_embeds=embedded).logits[:, :20]
    (grad,) = torch.autograd.grad(out.square().sum(), embedded)
    assert (grad[:, 20:] == 0).all()
    assert (grad[:, :20] != 0).any()
    model(prompt(43), labels=prompt(43)).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_with_last_rows_training_is_refused_with_what_is_strict(model):
    sq.hf.swap(model.train(), STRICT.replace("last=0", "last=3"))
    with pytest.raises(ValueError, match="queries=earlier,last=0"):
        model(prompt(43))


@torch.no_grad()
def test_rotary_positions_are_those_of_the_model():
    model = build("llama").model
    sq.hf.swap(model, STRICT)
    attached = [module for name, module in model.named_modules() if name.endswith("self_attn.subquad")]
    assert attached
    frequencies = model.model.rotary_emb.inv_freq
    assert all(torch.equal(each.rotary.frequencies.float(), frequencies) for each in attached)
    with_rotary = model(prompt(43)).logits
    for each in attached:
        each.rotary = None
    assert not torch.allclose(model(prompt(43)).logits, with_rotary, atol=1e-4)


@torch.no_grad()
def test_it_generates_and_left_padding_changes_nothing(model):
    sq.hf.swap(model, STRICT)
    ids = prompt(29, 3)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], 1)
    mask = (torch.arange(36) >= 7).long()[None]
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    alone = model.generate(ids, **options)[:, 29:]
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 36:], alone)


@torch.no_grad()
def test_it_is_saved_and_loaded_with_its_positions(tmp_path):
    model = build("llama").model
    sq.hf.swap(model, STRICT)
    want = model(prompt(43)).logits
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded.eval()(prompt(43)).logits, want)


@torch.no_grad()
def test_language_models_made_here_have_rotary_positions_too(tmp_path):
    model = CausalLanguageModel(LanguageConfig(hidden_size=32, num_hidden_layers=2, method=STRICT)).eval()
    ids = prompt(43)
    want = model(ids).logits
    torch.testing.assert_close(model(ids[:, :20]).logits, want[:, :20], rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = CausalLanguageModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(ids).logits, want)
    attached = [module for name, module in loaded.named_modules() if name.endswith(".subquad")]
    width = model.config.head_dim
    x = normal(1, 1, 1, width)
    moved = rotate(x, torch.tensor([[9]]))
    assert attached
    for each in attached:
        torch.testing.assert_close(each.rotary.turned(x, 9), moved)


def test_positions_that_change_with_the_length_are_refused_with_what_to_take():
    model = build("llama").model
    model.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(ValueError, match="'dynamic', whose frequencies change with the length; use queries=rectangle"):
        sq.hf.swap(model, STRICT)
