"""A prompt that is read into a static cache: methods see the filled slots, and compute what they do without a cache."""

import pytest
import torch
import transformers as hf

import subquad as sq
from subquad.hf.layers import Attached
from tests.library.hf.families import subject
from tests.library.hf.models import need_the_interface
from tests.library.hf.prompts import left_padded, prompt

METHODS = ("full:kernel=subquad", "clustered-tail:clusters=4,topk=4,cells=2,block=16,last=8", "local:window=8")


def into(model, kind, ids, mask=None):
    config = model.model.config
    cache = hf.StaticCache(config, 97) if kind == "static" else hf.DynamicCache(config=config)
    with torch.no_grad():
        first = model(ids[:, :48], cache, None if mask is None else mask[:, :48])
        return torch.cat([first, model(ids[:, 48:], cache, mask)], 1)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("padded", [False, True])
def test_the_slots_behind_a_prompt_change_nothing(name, method, padded):
    """Two calls of 48 tokens: the second one's queries do not begin at the first slot."""
    model = subject(name).swapped(method)
    ids, mask = left_padded([prompt(96), prompt(76)]) if padded else (torch.cat([prompt(96), prompt(96)]), None)
    want, have = into(model, "dynamic", ids, mask), into(model, "static", ids, mask)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(have[real], want[real], rtol=0, atol=0)


def test_methods_get_no_keys_of_empty_slots(monkeypatch):
    lengths, forward = [], Attached.forward

    def watched(self, query, key, value, **options):
        lengths.append((query.shape[2], key.shape[2], options["valid"] is None))
        return forward(self, query, key, value, **options)

    model, ids = subject("llama").swapped("local:window=8"), prompt(96)
    monkeypatch.setattr(Attached, "forward", watched)
    into(model, "static", ids)
    assert set(lengths) == {(48, 48, True), (48, 96, True)}


def test_a_bias_is_cut_to_the_filled_slots():
    """T5 gives its layers a bias on all slots of a static cache."""
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    t5, ids = hf.T5ForConditionalGeneration(config).eval(), torch.randint(5, 60, (2, 40))
    need_the_interface(t5)

    def logits(length=None):
        inner = hf.DynamicCache(config=config) if length is None else hf.StaticCache(config, length)
        caches = hf.EncoderDecoderCache(inner, hf.DynamicCache(config=config))
        with torch.no_grad():
            return t5(input_ids=ids, decoder_input_ids=ids, past_key_values=caches).logits

    own = logits()
    sq.hf.swap(t5, "full")
    torch.testing.assert_close(logits(64), own, atol=1e-5, rtol=0)
