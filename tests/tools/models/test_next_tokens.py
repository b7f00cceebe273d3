"""Next-token distributions beside those of the exact model."""

import math

import pytest
import torch

import subquad as sq
from subquad.tools.models.next_tokens import NextTokens, differences, logits_of, next_of, prefill, summed
from tests.library.hf.models import VOCAB, build

HALVES = "clustered:clusters=4,bits=15,iterations=3,block=8,last=2"


@pytest.fixture(params=["llama", "gpt2", "qwen3", "opt"])
def model(request):
    return build(request.param).model


@pytest.fixture
def batch(model):
    ids = torch.randint(5, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(ids)
    padding[1, 30:] = 0
    return {"input_ids": ids, "attention_mask": padding}


@torch.no_grad()
def whole(model, batch):
    return model(**batch, use_cache=False).logits


@torch.no_grad()
def test_the_logits_of_a_prefill_are_those_of_the_whole_forward_pass(model, batch):
    run, logits = prefill(model, batch), whole(model, batch)
    for positions in (slice(0, 40), slice(7, 9), slice(39, 80)):
        torch.testing.assert_close(logits_of(run, positions), logits[:, positions])
    torch.testing.assert_close(whole(model, batch), logits)  # the model is as it was


@torch.no_grad()
@pytest.mark.parametrize("step", [1, 7, 40, 50])
def test_some_positions_of_a_prefill_have_their_logits(model, batch, step):
    some = prefill(model, batch).every(step)
    wanted = whole(model, batch).flip(1)[:, ::step].flip(1)
    torch.testing.assert_close(logits_of(some, slice(None)), wanted)


@torch.no_grad()
def test_a_model_that_gives_all_logits_is_read_by_them(model, batch, monkeypatch):
    monkeypatch.setattr("subquad.tools.models.next_tokens._has_states", lambda _: False)
    run = prefill(model, batch)
    assert run.head is None
    torch.testing.assert_close(logits_of(run, slice(3, 5)), whole(model, batch)[:, 3:5])


@torch.no_grad()
def test_differences_are_those_of_all_logits_at_once(model, batch, monkeypatch):
    monkeypatch.setattr("subquad.tools.models.next_tokens.POSITIONS", 16)
    exact, run = whole(model, batch), prefill(model, batch)
    sq.hf.swap(model, HALVES)
    runs, other = {"full": run, HALVES: prefill(model, batch)}, whole(model, batch)
    sq.hf.restore(model)
    found = differences(runs, "full", *next_of(batch))
    counted = batch["attention_mask"][:, 1:].bool()
    p, q = (x[:, :-1].double().log_softmax(-1)[counted] for x in (exact, other))
    wanted = batch["input_ids"][:, 1:][counted]
    kl = (p.exp() * (p - q)).sum(-1)
    last = torch.cat([torch.arange(n) >= n - n // 4 for n in (39, 29)])
    mine = found[HALVES]
    assert mine.count == 68
    assert mine.last_count == 9 + 7
    assert mine.nll == pytest.approx(-float(q.gather(1, wanted[:, None]).sum()), rel=1e-4)
    assert mine.kl == pytest.approx(float(kl.sum()), rel=1e-3, abs=1e-5)
    assert mine.last_kl == pytest.approx(float(kl[last].sum()), rel=1e-3, abs=1e-5)
    assert mine.same == float((p.argmax(-1) == q.argmax(-1)).sum())
    assert mine.kl > 0
    its = found["full"]
    assert (its.kl, its.same, its.last_same) == (0, its.count, its.last_count)


def test_sums_add_up_over_texts():
    both = summed([NextTokens(2.0, 4.0, 0.5, 1.0, 1.0, 0.25, 1.0), NextTokens(2.0, 2.0, 0.1, 2.0, 1.0, 0.05, 0.0)])
    assert both.perplexity == pytest.approx(math.exp(1.5))
    assert (both.mean_kl, both.agreement) == (pytest.approx(0.15), 0.75)
    assert both.sums() == pytest.approx((4, 6, 0.6, 3, 2, 0.3, 1))
