"""Steps on the cache of a prompt, timed in turn."""

import random

import pytest
import torch
import transformers
from transformers import DynamicCache

from subquad.hf.layers import ATTACHED
from subquad.methods import parse_method
from subquad.tools.models import generation
from subquad.tools.models.generation import Prompts, has_exact_steps, new_cache, takes_cache, time_steps
from subquad.tools.models.pretrained import Pretrained
from tests.library.hf.models import VOCAB, build

HALVES = "clustered:clusters=4,bits=15,iterations=3,block=8,last=2"


class Tokens:
    pad_token_id = 0


@pytest.fixture(params=["llama", "gpt2", "qwen3", "gemma3"])
def pretrained(request):
    return Pretrained(request.param, build(request.param).model, Tokens(), "causal-lm", "mean", None)


@pytest.fixture
def items():
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(5, VOCAB, (n,), generator=draw).tolist() for n in (20, 12)]


@torch.no_grad()
def test_a_step_has_the_logits_of_a_whole_pass_over_each_text(pretrained, items):
    prompts = Prompts(pretrained, items, new_cache(pretrained.model, False))
    logits = prompts.step()
    for item, token, mine in zip(items, prompts.token[:, 0].tolist(), logits, strict=True):
        whole = pretrained.model(torch.tensor([[*item, token, token]]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(mine.float(), whole, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_step_leaves_the_cache_as_it_was(pretrained, items):
    prompts = Prompts(pretrained, items, new_cache(pretrained.model, False))
    before = prompts.cache.get_seq_length()
    (_, first), (_, second) = prompts.timed_step(), prompts.timed_step()
    assert torch.equal(first, second)
    assert prompts.cache.get_seq_length() == before == 21
    prompts.step()
    assert prompts.cache.get_seq_length() == 22


def hybrid(layers):
    """A model with these layers, whose linear attention and convolutions have states that steps change in place."""
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=len(layers), layer_types=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3NextForCausalLM(config).eval()
    return Pretrained("hybrid", model, Tokens(), "causal-lm", "mean", None)


def tensors_of(state):
    """All tensors of a layer of a cache, in order."""
    if isinstance(state, dict):
        return [tensor for each in state.values() for tensor in tensors_of(each)]
    return [state] if isinstance(state, torch.Tensor) else []


@torch.no_grad()
def test_a_step_leaves_the_states_of_a_hybrid_as_they_were(items):
    pretrained = hybrid(["linear_attention", "full_attention"])
    prompts = Prompts(pretrained, items, new_cache(pretrained.model, False))
    before = [[x.clone() for x in tensors_of(vars(layer))] for layer in prompts.cache.layers]
    assert all(before)
    (_, first), (_, second) = prompts.timed_step(), prompts.timed_step()
    assert torch.equal(first, second)
    for layer, tensors in zip(prompts.cache.layers, before, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(tensors_of(vars(layer)), tensors, strict=True))
    prompts.step()
    assert not torch.equal(tensors_of(vars(prompts.cache.layers[0]))[-1], before[0][-1])


def test_rows_are_timed_in_turn_and_compared_with_exact_steps(pretrained, items):
    window = parse_method("local:window=3")
    runs = {"full": (pretrained, None), "halves": (pretrained, parse_method(HALVES)), "local": (pretrained, window)}
    if pretrained.name == "gemma3":  # whose layers have windows of their own
        del runs["local"]
    times = time_steps(runs, items, random.Random(0), rounds=3)
    assert all(len(row.seconds) == 3 and min(row.seconds) > 0 for row in times.rows.values())
    assert times.rows["full"].kl is None
    assert times.rows["halves"].kl < 1e-9
    assert "local" not in runs or times.rows["local"].kl > 1e-9
    assert set(times.cache_mib) == {"fp32"}
    assert times.cache_mib["fp32"] > 0


def test_a_refused_step_has_a_reason(pretrained, items, monkeypatch):
    step = Prompts.step

    def refused(self):
        if getattr(self.model.config, "_attn_implementation", "") == ATTACHED:
            raise ValueError("no steps\nhere")
        return step(self)

    monkeypatch.setattr(Prompts, "step", refused)
    runs = {"full": (pretrained, None), "halves": (pretrained, parse_method(HALVES))}
    rows = time_steps(runs, items[:1], random.Random(0), rounds=2).rows
    assert (rows["halves"].reason, rows["halves"].seconds) == ("no steps here", [])
    assert len(rows["full"].seconds) == 2


def test_rows_share_the_prompts_of_a_cache_of_their_type(pretrained, items, monkeypatch):
    class OfSwapped(DynamicCache):
        """Another type."""

    read = []
    prompts = generation.Prompts
    monkeypatch.setattr(generation, "Prompts", lambda *given: read.append(type(given[-1])) or prompts(*given))
    runs = {"full": (pretrained, None), "halves": (pretrained, parse_method(HALVES)), "again": (pretrained, None)}
    time_steps(runs, items, random.Random(0), rounds=1)
    assert read == [DynamicCache]
    monkeypatch.setattr(
        generation, "new_cache", lambda model, swapped: (OfSwapped if swapped else DynamicCache)(config=model.config)
    )
    assert time_steps(runs, items, random.Random(0), rounds=1).rows["halves"].kl < 1e-9
    assert read == [DynamicCache, DynamicCache, OfSwapped]


@pytest.mark.parametrize(
    ("method", "exact"),
    [
        ("full", True),
        ("full:kernel=subquad", True),
        ("clustered-tail", True),
        ("i-clustered", True),
        ("clustered-tail:queries=earlier,last=0", False),
        ("local:window=512+keep", False),
        ("performer", False),
        ("by-length:steps=0:full+2000:clustered-tail", True),
        ("by-length:steps=0:full+2000:local", False),
    ],
)
def test_which_steps_are_exact(method, exact):
    assert has_exact_steps(parse_method(method)) is exact


def test_a_model_that_takes_no_cache():
    class Plain(torch.nn.Module):
        def forward(self, input_ids):
            return input_ids

    assert not takes_cache(Plain())
