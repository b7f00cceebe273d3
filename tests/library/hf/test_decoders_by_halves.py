"""Prompts of decoders by halves: padding, caches, generation, and what is saved."""

import copy

import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import subquad as sq
from tests.library.hf.models import build
from tests.library.hf.prompts import left_padded, prompt
from tests.tools.workflows.tiny import save

HALVES = "clustered-tail:clusters=4,topk=3,cells=2,bits=15,iterations=3,block=8,last=3"
ONE_BLOCK = "clustered-tail:block=64"
DECODERS = ("llama", "gpt2", "qwen3", "opt", "phi")
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture(params=DECODERS)
def model(request):
    return build(request.param).model


@torch.no_grad()
def test_a_prompt_of_one_block_is_generated_from_exactly(model):
    ids = prompt(20)
    want = [model.generate(ids, num_beams=beams, **GREEDY) for beams in (1, 3)]
    sq.hf.swap(model, ONE_BLOCK)
    for beams, tokens in zip((1, 3), want, strict=True):
        assert torch.equal(model.generate(ids, num_beams=beams, **GREEDY), tokens)


@torch.no_grad()
def test_a_longer_prompt_differs_from_exact_and_its_last_rows_do_not_in_the_first_layer(model):
    ids = prompt(40)
    want = model(ids, output_hidden_states=True)
    sq.hf.swap(model, {0: HALVES})
    have = model(ids, output_hidden_states=True)
    torch.testing.assert_close(have.hidden_states[1][:, :8], want.hidden_states[1][:, :8])  # the first block
    torch.testing.assert_close(have.hidden_states[1][:, -3:], want.hidden_states[1][:, -3:])
    assert not torch.allclose(have.hidden_states[1], want.hidden_states[1])


@torch.no_grad()
def test_left_padded_prompts_are_those_alone(model):
    prompts = [prompt(40, 1), prompt(23, 2), prompt(5, 3)]
    ids, mask = left_padded(prompts)
    sq.hf.swap(model, HALVES)
    together = model.generate(ids, attention_mask=mask, **GREEDY)
    for row, alone in zip(together, prompts, strict=True):
        assert torch.equal(row[-6:], model.generate(alone, **GREEDY)[0, -6:])


@torch.no_grad()
def test_steps_on_the_cache_are_exact(model):
    ids = prompt(40)
    sq.hf.swap(model, HALVES)
    first = model(ids[:, :-1], use_cache=True)
    cache = copy.deepcopy(first.past_key_values)
    step = model(ids[:, -1:], past_key_values=first.past_key_values).logits
    sq.hf.restore(model)
    torch.testing.assert_close(step, model(ids[:, -1:], past_key_values=cache).logits)


@torch.no_grad()
@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"num_beams": 2}, {"prefill_chunk_size": 16}])
def test_every_way_of_generating_runs_by_halves(options):
    model = build("llama").model
    sq.hf.swap(model, HALVES)
    prompts = left_padded([prompt(40, 1), prompt(33, 2)])
    found = model.generate(prompts[0], attention_mask=prompts[1], **GREEDY, **options)
    assert found.shape == (2, 46)
    if "cache_implementation" in options:
        assert torch.equal(found, model.generate(prompts[0], attention_mask=prompts[1], **GREEDY))


@torch.no_grad()
def test_assisted_generation_gives_the_tokens_of_the_model_alone():
    model, helper = build("llama").model, build("llama").model
    sq.hf.swap(model, ONE_BLOCK)
    ids = prompt(20)
    assert torch.equal(model.generate(ids, assistant_model=helper, **GREEDY), model.generate(ids, **GREEDY))


@torch.no_grad()
def test_a_model_is_saved_with_its_halves(tmp_path):
    model, ids = build("llama").model, prompt(40)
    sq.hf.swap(model, HALVES)
    want = model(ids).logits
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    sq.hf.reattach(loaded)
    assert set(sq.hf.describe(loaded).methods.values()) == {sq.parse_method(HALVES)}
    torch.testing.assert_close(loaded(ids).logits, want)


@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_a_decoder_that_embeds_texts_gives_each_text_what_it_gets_alone(pooling, tmp_path):
    save("qwen3", tmp_path)
    inside = Transformer(str(tmp_path), max_seq_length=60)
    model = SentenceTransformer(modules=[inside, Pooling(inside.get_embedding_dimension(), pooling)], device="cpu")
    texts = ["the key " * 20, "the model reads the text", "the " * 40]
    exact = torch.tensor(model.encode(texts))
    sq.hf.swap(model, ONE_BLOCK)
    torch.testing.assert_close(torch.tensor(model.encode(texts)), exact)
    sq.hf.swap(model, HALVES)
    together = torch.tensor(model.encode(texts))
    assert not torch.allclose(together, exact)
    for text, vector in zip(texts, together, strict=True):
        torch.testing.assert_close(torch.tensor(model.encode(text)), vector)


def test_windowed_layers_are_left_where_the_others_are_swapped():
    model = build("gemma3").model
    refused = sq.hf.refusals(model, HALVES)
    assert sorted(refused) == [0, 2]
    assert "window" in refused[0]
    swapped = sq.hf.swap(model, HALVES)
    assert [swapped.methods[n].is_exact for n in range(4)] == [True, False, True, False]
    with torch.no_grad():
        found = model(prompt(40)).logits
        sq.hf.swap(model, {1: HALVES, 3: HALVES})
        torch.testing.assert_close(found, model(prompt(40)).logits, atol=0, rtol=0)
        sq.hf.restore(model)
        exact = model(prompt(40)).logits
    assert found.isfinite().all()
    assert not torch.allclose(found, exact)
