"""`generate` by halves in all its ways: at the exact limit its tokens and logits are those of the model itself."""

import copy
from itertools import pairwise

import pytest
import torch
from transformers import DynamicCache, StaticCache

import subquad as sq
from tests.library.hf.models import build
from tests.library.hf.prompts import generated, left_padded, prompt
from tests.library.hf.test_decoders_by_halves import HALVES

BLOCK = 8
EXACT = {last: f"clustered-tail:topk=1000,block={BLOCK},last={last}" for last in (0, 3)}
STATIC = {"cache_implementation": "static", "disable_compile": True}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beams on a static cache": {"num_beams": 3, **STATIC},
    "static cache": STATIC,
    "no cache": {"use_cache": False},
    "chunks shorter than a block": {"prefill_chunk_size": BLOCK - 3},
    "chunks of two blocks": {"prefill_chunk_size": 2 * BLOCK},
    "chunks on a static cache": {"prefill_chunk_size": BLOCK, **STATIC},
    "sampling": {"do_sample": True, "top_k": 10, "temperature": 2.0},
    "sampled beams": {"do_sample": True, "num_beams": 2},
}
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 27)


@pytest.fixture(params=["llama", "gpt2", "gemma3"])
def model(request):
    return build(request.param).model


def assert_same(have, want):
    assert torch.equal(have[0], want[0])
    torch.testing.assert_close(have[1], want[1], atol=1e-3, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_models_own_tokens_at_the_exact_limit(model, way):
    ids, mask = left_padded([prompt(40, 1), prompt(1, 2), prompt(23, 3)])  # of one, a chunk is padding alone
    want = generated(model, ids, mask, **WAYS[way])
    for method in EXACT.values():
        sq.hf.swap(model, method)
        assert_same(generated(model, ids, mask, **WAYS[way]), want)


@torch.no_grad()
def test_prompts_of_every_length_at_the_exact_limit(model):
    want = [generated(model, prompt(length), **STATIC) for length in LENGTHS]
    for method in EXACT.values():
        sq.hf.swap(model, method)
        for length, own in zip(LENGTHS, want, strict=True):
            assert_same(generated(model, prompt(length), **STATIC), own)


@torch.no_grad()
def test_assisted_generation_by_halves_gives_the_models_own_tokens(model):
    ids, helper = prompt(27), copy.deepcopy(model)
    want = generated(model, ids)[0]
    sq.hf.swap(helper, HALVES)
    for method in EXACT.values():
        sq.hf.swap(model, method)
        assert torch.equal(generated(model, ids, assistant_model=helper)[0], want)
        assert torch.equal(generated(model, ids, prompt_lookup_num_tokens=3)[0], want)


def talked(model, cache):
    """A second turn of a conversation, of which the cache holds the first."""
    first, mask = left_padded([prompt(21, 1), prompt(13, 2)])
    tokens, _ = generated(model, first, mask, past_key_values=cache, disable_compile=True)
    ids = torch.cat([tokens, prompt(11, 4).expand(2, -1)], 1)
    mask = torch.cat([mask, torch.ones(2, ids.shape[1] - mask.shape[1], dtype=torch.long)], 1)
    return generated(model, ids, mask, past_key_values=cache, disable_compile=True)


@torch.no_grad()
@pytest.mark.parametrize("make", [
    lambda config: DynamicCache(config=config), lambda config: StaticCache(config, max_cache_len=60),
])  # fmt: skip
def test_a_conversation_goes_on_at_the_exact_limit(model, make):
    want = talked(model, make(model.config))
    for method in EXACT.values():
        sq.hf.swap(model, method)
        assert_same(talked(model, make(model.config)), want)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, STATIC])
def test_prompts_of_very_different_lengths_are_those_alone(model, options):
    prompts = [prompt(40, 1), prompt(BLOCK + 1, 2), prompt(BLOCK, 3), prompt(1, 4)]
    ids, mask = left_padded(prompts)
    sq.hf.swap(model, HALVES)
    tokens, logits = generated(model, ids, mask, **options)
    for row, alone in enumerate(prompts):
        want = generated(model, alone, **options)
        assert torch.equal(tokens[row, -6:], want[0][0, -6:])
        torch.testing.assert_close(logits[:, row], want[1][:, 0], atol=1e-3, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("position", [0, 20, 39])
def test_nan_in_one_prompt_stays_in_its_row(model, position):
    ids, mask = left_padded([prompt(40, 1), prompt(31, 2), prompt(40, 3)])
    vectors = model.get_input_embeddings()(ids)
    sq.hf.swap(model, HALVES)
    want = model(inputs_embeds=vectors, attention_mask=mask).logits
    vectors[0, position] = torch.nan
    have = model(inputs_embeds=vectors, attention_mask=mask).logits
    torch.testing.assert_close(have[1:], want[1:])
    assert have[0, position:].isnan().all()


@torch.no_grad()
def test_a_prompt_that_is_padding_alone_changes_no_other(model):
    ids, mask = left_padded([prompt(40, 1), prompt(40, 2)])
    mask[1] = 0
    sq.hf.swap(model, HALVES)
    logits = model(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:1], model(ids[:1]).logits, atol=1e-3, rtol=1e-4)


@torch.no_grad()
def test_packed_prompts_are_those_alone(model):
    lengths = (17, 23)
    ids, ends = prompt(40), torch.tensor([0, *lengths]).cumsum(0).tolist()
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    sq.hf.swap(model, HALVES)
    packed = model(ids, position_ids=positions, use_cache=False).logits
    for start, end in pairwise(ends):
        torch.testing.assert_close(packed[:, start:end], model(ids[:, start:end]).logits, atol=1e-3, rtol=1e-4)


@torch.no_grad()
def test_a_model_in_bf16_is_saved_with_its_halves(model, tmp_path):
    model = model.bfloat16()
    swapped = sq.hf.swap(model, HALVES)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.dtype == torch.bfloat16
    assert sq.hf.describe(loaded).methods == swapped.methods
    assert str(sq.hf.describe(loaded)) == str(swapped)
    again = type(model).from_pretrained(tmp_path).eval()
    sq.hf.restore(again)
    sq.hf.swap(again, HALVES)
    assert torch.equal(loaded(prompt(40)).logits, again(prompt(40)).logits)
