"""Rotary positions of decoders, as trials determine them."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import transformers as hf
from torch import nn

import subquad as sq
from subquad.hf.layers import NAME, attached_to
from subquad.hf.probe import find_layers
from subquad.hf.rotary_trial import find_rotary
from subquad.hf.trial import recorded_run
from subquad.methods import Full
from tests.library.hf.models import TEXT, build, need_transformers

BIG = TEXT | {"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}
LAYERS = {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
          "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
GEMMA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def llama(**options):
    return hf.LlamaForCausalLM, hf.LlamaConfig(**BIG, **HEADS, **options)


ROTARY = {
    "llama": lambda: llama(),
    "llama-llama3": lambda: llama(rope_parameters={"rope_type": "llama3", **SCALED, **BANDS}),
    "llama-yarn": lambda: llama(rope_parameters={"rope_type": "yarn", **SCALED}),
    "llama-linear": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}),
    "mistral": lambda: (hf.MistralForCausalLM, hf.MistralConfig(**BIG, **HEADS, sliding_window=6)),
    "qwen3": lambda: (hf.Qwen3ForCausalLM, hf.Qwen3Config(**BIG, **HEADS)),
    "gemma3": lambda: (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**BIG, **HEADS, **GEMMA, rope_parameters=LAYERS)),
    "gpt-neox": lambda: (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**BIG, rotary_pct=0.5)),
    "phi": lambda: (hf.PhiForCausalLM, hf.PhiConfig(**BIG, partial_rotary_factor=0.5)),
    "glm": lambda: (hf.GlmForCausalLM, hf.GlmConfig(**BIG, **HEADS)),
    "nanochat": lambda: (hf.NanoChatForCausalLM, hf.NanoChatConfig(**BIG, num_key_value_heads=2)),
    "cohere": lambda: (hf.CohereForCausalLM, hf.CohereConfig(**BIG, num_key_value_heads=2)),
}  # fmt: skip
PAIRS = {"gpt-neox": (2, False), "phi": (2, False), "glm": (2, True), "cohere": (4, True)}


def make(kind, config, dtype=torch.float32):
    torch.manual_seed(0)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3.0)
    return model.to(dtype).eval()


def made(name, dtype=torch.float32):
    return make(*ROTARY[name](), dtype)


def rotaries(model):
    layers = find_layers(model)
    by_module = find_rotary(model, layers)
    return [by_module[layer.module] for layer in layers]


def queries(model, offset):
    ids = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(offset, offset + 7)[None]
    calls = recorded_run(model, lambda model: model(input_ids=ids, position_ids=positions, use_cache=False))
    return [call.query for call in calls]


def check(model, result, tolerance):
    """Queries of ordinary hidden states, at distances that no trial uses."""
    first = queries(model, 0)
    for offset in (1, 23, 140, 402):
        for layer, (before, after, rotary) in enumerate(zip(first, queries(model, offset), result, strict=True)):
            apart = (rotary.turned(before.double(), offset) - after).norm() / after.norm()
            assert apart < tolerance, (layer, offset)


@pytest.mark.parametrize("name", ROTARY)
def test_the_rotary_of_each_layer_turns_its_queries(name):
    model = made(name)
    result = rotaries(model)
    pairs, interleaved = PAIRS.get(name, (4, False))
    assert [(len(each.frequencies), each.interleaved) for each in result] == [(pairs, interleaved)] * 2
    check(model, result, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "llama-yarn", "gemma3", "glm"])
def test_models_of_16_bits(name, dtype):
    model = made(name, dtype)
    result = rotaries(model)
    assert all(each.frequencies.dtype == torch.float32 for each in result)
    assert result[0].interleaved == (name == "glm")
    check(model, result, 5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("component", [0, 3, 5])
def test_one_large_component_hides_no_turn(component, dtype):
    model = make(hf.Qwen2ForCausalLM, hf.Qwen2Config(**BIG, num_key_value_heads=2), dtype)
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias.data.view(4, 8)[:, component] = 300.0
    assert [(len(each.frequencies), each.interleaved) for each in rotaries(model)] == [(4, False)] * 2
    for name in ("inv_freq", "original_inv_freq"):
        setattr(model.model.rotary_emb, name, model.model.rotary_emb._buffers.pop(name).clone())
    with pytest.raises(ValueError, match="depend on their positions"):
        rotaries(model)


def test_layers_of_two_kinds_have_their_own_frequencies():
    local, full = rotaries(made("gemma3"))
    torch.testing.assert_close(local.frequencies, 1e4 ** -(torch.arange(4) / 4))
    torch.testing.assert_close(full.frequencies, 1e6 ** -(torch.arange(4) / 4))


def test_layers_that_differ_in_scaling_alone_are_told_apart_in_16_bits():
    need_transformers(5, 9, what="looks for YaRN's settings of one kind of layers among those of all")
    kinds = {"full_attention": {"rope_type": "yarn", **SCALED}, "sliding_attention": LAYERS["sliding_attention"]}
    model = make(
        hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**BIG, **HEADS, **GEMMA, rope_parameters=kinds), torch.bfloat16
    )
    local, full = rotaries(model)
    torch.testing.assert_close(local.frequencies, model.model.rotary_emb.sliding_attention_inv_freq.float())
    torch.testing.assert_close(full.frequencies, model.model.rotary_emb.full_attention_inv_freq.float())
    assert not torch.equal(local.frequencies, full.frequencies)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bart"])
def test_learned_positions_turn_nothing(name):
    model = build(name).model
    layers = [layer for layer in find_layers(model) if layer.causal]
    assert list(find_rotary(model, layers).values()) == [None] * 2


def test_layers_without_positions_turn_nothing():
    config = hf.SmolLM3Config(**(BIG | {"num_hidden_layers": 4}), num_key_value_heads=2, no_rope_layers=[1, 0, 1, 0])
    result = rotaries(make(hf.SmolLM3ForCausalLM, config))
    assert [each is None for each in result] == [False, True, False, True]


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_length_are_refused(rope_type):
    extra = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if rope_type == "longrope" else {}
    model = make(*llama(rope_parameters={"rope_type": rope_type, **SCALED, **extra}))
    message = rf"layer 0 \(model.layers.0.self_attn\) .*: its rotary positions are of the type '{rope_type}'"
    with pytest.raises(ValueError, match=message):
        rotaries(model)


def test_positions_of_several_axes_are_refused():
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = hf.Qwen2VLTextConfig(**BIG, num_key_value_heads=2, rope_parameters=rope)
    model = make(hf.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLTextModel, config)
    with pytest.raises(ValueError, match="several axes"):
        rotaries(model)


def test_an_unknown_turn_is_refused():
    config = hf.DeepseekV3Config(
        **BIG, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=8, first_k_dense_replace=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="depend on their positions, but not by any"):
        rotaries(make(hf.DeepseekV3ForCausalLM, config))


def test_frequencies_that_are_no_buffer_are_refused():
    model = made("llama")
    for name in ("inv_freq", "original_inv_freq"):
        setattr(model.model.rotary_emb, name, model.model.rotary_emb._buffers.pop(name).clone())
    with pytest.raises(ValueError, match="not by rotary frequencies in a buffer"):
        rotaries(model)


def test_queries_that_are_zero_show_nothing():
    model = made("llama")
    nn.init.zeros_(model.model.layers[1].self_attn.q_proj.weight)
    with pytest.raises(ValueError, match=r"layer 1 .*its queries are 0"):
        rotaries(model)


def test_a_layer_that_no_input_reaches_is_refused():
    model = made("llama")
    layers = find_layers(model)
    model.model.layers = model.model.layers[:1]
    with pytest.raises(ValueError, match=r"layer 1 .*not reached"):
        find_rotary(model, layers)


def test_the_model_is_left_as_it_was():
    model = make(*llama(rope_parameters={"rope_type": "yarn", **SCALED}, attention_dropout=0.1)).train()
    state = copy.deepcopy(dict(model.named_buffers()) | model.state_dict())
    implementation, random = model.config._attn_implementation, torch.get_rng_state()
    result = rotaries(model)
    assert model.training
    assert model.config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(x, state[name]) for name, x in (dict(model.named_buffers()) | model.state_dict()).items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    model.model.rotary_emb.inv_freq.zero_()  # the result is a copy
    assert all(each.frequencies.any() for each in result)


# ---------------------------------------------------------------------- in swapped models


@dataclass(frozen=True)
class Earlier(Full):
    """Exact attention that writes down which rotary positions it gets, if it has any."""

    queries: str = "earlier"

    name: ClassVar[str] = "earlier-queries"
    log: ClassVar[list] = []

    def prepare(self, *arguments, rotary=None, **options):
        self.log.append(rotary)
        return super().prepare(*arguments, **options)


@pytest.fixture
def log():
    Earlier.log.clear()
    return Earlier.log


@torch.no_grad()
def test_a_method_of_earlier_queries_gets_the_rotary_of_its_layer(log):
    model = made("gemma3")
    result = rotaries(model)
    ids = torch.randint(5, 60, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0  # padded queries run apart, by a method that takes no rotary positions
    want = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    keys = model.state_dict().keys()
    sq.hf.swap(model, {0: Earlier(), 1: Earlier()})
    have = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)
    assert [each.frequencies.tolist() for each in log] == [each.frequencies.tolist() for each in result]
    assert model.state_dict().keys() == keys
    sq.hf.swap(model, {0: Earlier()})  # swapping again
    log.clear()
    model(input_ids=ids)
    assert len(log) == 1
    assert torch.equal(log[0].frequencies, result[0].frequencies)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"attn_implementation": "sdpa"}])
def test_a_saved_model_is_loaded_with_the_rotary_of_its_layers(options, tmp_path, monkeypatch):
    monkeypatch.setattr("subquad.hf.swapping.moves_queries", lambda method: True)  # also the methods of the package
    model = made("llama-yarn")
    sq.hf.swap(model, "clustered-tail:block=8")
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    if "attn_implementation" in options:
        sq.hf.reattach(loaded)
    for layer, other in zip(model.model.layers, loaded.model.layers, strict=True):
        want, have = (attached_to(each.self_attn).rotary for each in (layer, other))
        assert torch.equal(have.frequencies, want.frequencies)


@torch.no_grad()
def test_copies_and_casts_of_a_model_keep_the_rotary(log):
    model = made("llama")
    sq.hf.swap(model, Earlier())
    other = copy.deepcopy(model).to(torch.bfloat16)
    other(input_ids=torch.randint(5, 60, (1, 9)))
    assert len(log) == 2
    assert all(each.frequencies.dtype == torch.float32 for each in log)


@torch.no_grad()
def test_frequencies_follow_the_queries_to_their_device():
    model = made("llama")
    sq.hf.swap(model, Earlier())
    attached = attached_to(model.model.layers[0].self_attn)
    query, key = torch.randn(1, 4, 5, 8, device="meta"), torch.randn(1, 2, 5, 8, device="meta")
    attached(query, key, key, mask=sq.Mask.causal())
    assert attached.rotary.frequencies.device.type == "meta"
    before = attached.rotary
    attached(query, key, key, mask=sq.Mask.causal())
    assert attached.rotary is before  # moved once


@torch.no_grad()
def test_without_rotary_positions_the_method_gets_none(log):
    model = build("gpt2").model
    sq.hf.swap(model, Earlier())
    model(input_ids=torch.randint(5, 60, (1, 9)))
    assert log == [None, None]


def test_swap_refuses_rotary_positions_that_are_not_known():
    model = make(*llama(rope_parameters={"rope_type": "dynamic", **SCALED}))
    with pytest.raises(ValueError, match=r"layer 0 .*'dynamic'.*; use queries=rectangle or queries=block"):
        sq.hf.swap(model, Earlier())
    assert not hasattr(model.model.layers[0].self_attn, NAME)


def test_other_methods_cost_no_trial(monkeypatch):
    monkeypatch.setattr("subquad.hf.swapping.find_rotary", lambda *_: pytest.fail("a trial"))
    for method in ("clustered-tail:block=8", "full"):
        model = made("llama")
        sq.hf.swap(model, method)
        assert attached_to(model.model.layers[0].self_attn).rotary is None
