"""Tests of what models hand to their attention: padding, packing, caches, windows, and what is refused."""

import json

import pytest
import torch
import transformers as hf
from torch.utils._python_dispatch import TorchDispatchMode

import subquad as sq
from subquad.hf.boundary import attend
from tests.forks import output_of
from tests.library.hf.models import TEXT, VOCAB, build, padded_ids

GENERATE = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_generate_left_padded(name, cache):
    case = build(name)
    options = GENERATE | {"cache_implementation": cache}
    want = case.model.generate(**case.inputs, **options)
    sq.hf.swap(case.model, "full")
    have = case.model.generate(**case.inputs, **options)
    torch.testing.assert_close(torch.stack(have.logits), torch.stack(want.logits), atol=1e-4, rtol=1e-4)
    assert torch.equal(have.sequences, want.sequences)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_generate_encoder_decoder(name):
    case = build(name)
    inputs = {k: v for k, v in case.inputs.items() if not k.startswith("decoder")}
    want = case.model.generate(**inputs, **GENERATE)
    sq.hf.swap(case.model, "full")
    have = case.model.generate(**inputs, **GENERATE)
    torch.testing.assert_close(torch.stack(have.logits), torch.stack(want.logits), atol=1e-4, rtol=1e-4)


def test_beam_search():
    case = build("llama")
    want = case.model.generate(**case.inputs, max_new_tokens=5, num_beams=3, do_sample=False)
    sq.hf.swap(case.model, "full")
    assert torch.equal(case.model.generate(**case.inputs, max_new_tokens=5, num_beams=3, do_sample=False), want)


def test_static_cache_step_by_step_equals_one_pass():
    model = build("llama").model
    ids, _ = padded_ids(pads=0)
    want = model(input_ids=ids).logits
    sq.hf.swap(model, "full")
    cache = hf.StaticCache(config=model.config, max_cache_len=40)
    first = model(input_ids=ids[:, :9], past_key_values=cache).logits
    second = model(input_ids=ids[:, 9:14], past_key_values=cache).logits
    steps = [model(input_ids=ids[:, t : t + 1], past_key_values=cache).logits for t in range(14, 17)]
    torch.testing.assert_close(torch.cat([first, second, *steps], 1), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_sequences_equal_separate_ones(name):
    model = build(name).model
    sq.hf.swap(model, "full")
    ids, _ = padded_ids(pads=0)
    position_ids = torch.cat([torch.arange(7), torch.arange(10)])[None].expand(2, -1)
    packed = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits
    apart = [model(input_ids=ids[:, :7]).logits, model(input_ids=ids[:, 7:]).logits]
    torch.testing.assert_close(packed, torch.cat(apart, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradient_checkpointing(name):
    case = build(name)
    case.model.train()
    for module in case.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    sq.hf.swap(case.model, "full" if name == "llama" else "i-clustered:clusters=4,topk=3")

    def gradient():
        case.model.zero_grad()
        torch.manual_seed(3)
        case.output().square().mean().backward()
        return [p.grad.clone() for p in case.model.parameters() if p.grad is not None]

    want = gradient()
    case.model.gradient_checkpointing_enable()
    for have, wanted in zip(gradient(), want, strict=True):
        torch.testing.assert_close(have, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        ["bert=i-clustered:clusters=4,topk=3", "llama=full", "modernbert=full", "bart=full"],
        pytest.param(["bert=full"], marks=pytest.mark.long),  # compiles as bert with another method, as llama with full
    ],
    ids=["in CI", "long"],
)
def test_compiled_equals_eager_without_a_graph_break(cases):
    results = json.loads(output_of("tests.library.hf.compiled", *cases).splitlines()[-1])
    assert dict(zip(cases, results, strict=True)) == dict.fromkeys(cases)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full:kernel=subquad", "clustered-tail:block=64,last=8"])
def test_a_compiled_prefill_is_one_program_for_all_lengths(unchecked, method):
    """Its scale is symbolic, too: Dynamo takes numbers of modules for variables if the lengths are."""
    model = build("llama").model
    sq.hf.swap(model, method)
    torch._dynamo.reset()
    prefill = torch.compile(model.forward, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        for length in (100, 180, 250):
            ids = torch.arange(length)[None] % VOCAB
            assert torch.equal(prefill(input_ids=ids).logits, model(input_ids=ids).logits)


def test_dropout_reaches_the_method_in_training_only():
    case = build("bert")
    for module in case.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for layer in sq.hf.find_layers(case.model):
        layer.module.dropout.p = 0.5
    sq.hf.swap(case.model, "clustered:clusters=4")
    assert torch.equal(case.output(), case.output())
    case.model.train()
    assert not torch.equal(case.output(), case.output())


class LargestTensor(TorchDispatchMode):
    """Remember the largest number of elements of any tensor that an operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize(("method", "quadratic"), [
    ("clustered:clusters=4", False), ("i-clustered:clusters=4,topk=3", False), ("oracle-top:topk=3", True)
])  # fmt: skip
def test_no_tensor_over_queries_and_keys_for_a_linear_method(method, quadratic):
    length = 2048
    config = hf.BertConfig(**(TEXT | {"max_position_embeddings": length, "hidden_size": 8, "num_attention_heads": 1}))
    model = hf.BertModel(config).eval()
    sq.hf.swap(model, method)
    ids = torch.randint(5, VOCAB, (1, length))
    mask = torch.ones_like(ids)
    mask[0, -100:] = 0
    with torch.no_grad(), LargestTensor() as seen:
        model(input_ids=ids, attention_mask=mask)
    assert (seen.largest >= length * length) == quadratic


@pytest.mark.parametrize("kind", ["segments", "window", "causal"])
def test_a_4d_mask_of_the_user_is_read(kind):
    model = build("bert").model
    ids, _ = padded_ids()
    position = torch.arange(17)
    distance = position - position[:, None]
    segments = position // 6
    allowed = {"segments": segments == segments[:, None], "window": distance.abs() <= 3, "causal": distance <= 0}[kind]
    bias = torch.where(allowed, 0.0, torch.finfo(torch.float32).min).expand(2, 1, 17, 17)
    want = model(input_ids=ids, attention_mask=bias).last_hidden_state
    sq.hf.swap(model, "full")
    have = model(input_ids=ids, attention_mask=bias).last_hidden_state
    torch.testing.assert_close(have, want, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(have, model(input_ids=ids).last_hidden_state, atol=1e-3)


def test_a_4d_mask_that_a_method_cannot_follow_is_refused():
    model = build("bert").model
    sq.hf.swap(model, "smyrf:clusters=4")
    ids, _ = padded_ids()
    with pytest.raises(ValueError, match="causal"):
        model(input_ids=ids, attention_mask=torch.ones(17, 17, dtype=torch.bool).tril().expand(2, 1, 17, 17))


def test_a_4d_mask_of_another_pattern_is_refused():
    model = build("bert").model
    sq.hf.swap(model, "full")
    ids, _ = padded_ids()
    other = torch.rand(2, 1, 17, 17, generator=torch.Generator().manual_seed(0)) > 0.5
    with pytest.raises(ValueError, match=r"layer 0 .*not padding of the keys, causality, segments or a window; pass a"):
        model(input_ids=ids, attention_mask=other)


def test_a_mask_of_the_wrong_length_names_both():
    model = build("bert").model
    sq.hf.swap(model, "full")
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[:, -1] = 0
    with pytest.raises(ValueError, match="has 14 positions, but there are 17 keys"):
        model(input_ids=padded_ids()[0], attention_mask=mask)


def test_asking_for_attention_weights_is_refused():
    model = build("bert").model
    sq.hf.swap(model, "full")
    with pytest.raises(ValueError, match="output_attentions"):
        model(input_ids=padded_ids()[0], output_attentions=True)


@pytest.mark.parametrize("kind", ["capped logits", "sinks"])
def test_what_stands_beside_the_softmax_is_for_exact_attention_alone(kind):
    torch.manual_seed(0)
    options = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
    if kind == "capped logits":
        model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**options, attn_logit_softcapping=0.5)).eval()
    else:
        config = hf.GptOssConfig(**options, num_local_experts=2, num_experts_per_tok=1, sliding_window=5)
        model = hf.GptOssForCausalLM(config).eval()
        for layer in model.model.layers:
            layer.self_attn.sinks.data.normal_()
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
    model.set_attn_implementation("eager")
    ids, mask = padded_ids(side="left")
    want = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    assert set(sq.hf.refusals(model, "local:window=4")) == {0, 1}
    with pytest.raises(ValueError, match=f"'local' knows no {kind}, which this layer has; 'full' does"):
        sq.hf.swap(model, "local:window=4")
    sq.hf.swap(model, "full")
    have = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(have, want, atol=1e-4, rtol=1e-4)


def test_a_keyword_that_could_change_the_result_is_refused_by_name():
    model = build("llama").model
    sq.hf.swap(model, "full")
    module = sq.hf.find_layers(model)[0].module
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"layer 0 .*'block_indices'"):
        attend(module, q, k, k, None, block_indices=torch.zeros(3))


def test_the_window_of_a_step_ends_at_the_last_filled_slot_of_a_static_cache():
    model = build("mistral").model
    sq.hf.swap(model, "full")
    module = sq.hf.find_layers(model)[0].module
    q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8)
    filled = torch.where(torch.arange(40) < 14, 1, -1).to(torch.int16)[None, None, None]
    out, _ = attend(module, q, k, v, filled)
    want = sq.attention(q, k[:, :, 9:14], v[:, :, 9:14], method="full", enable_gqa=True)
    torch.testing.assert_close(out, want.transpose(1, 2))


def test_windows_are_those_of_the_mask_function():
    """Phi-MoE's mask has the window of its config, of which its attention is not told."""
    config = hf.PhimoeConfig(**TEXT, num_key_value_heads=2, sliding_window=5, num_local_experts=2)
    model = hf.PhimoeForCausalLM(config).eval()
    ids = padded_ids(pads=0)[0]
    want = model(input_ids=ids).logits
    sq.hf.swap(model, "full")
    torch.testing.assert_close(model(input_ids=ids).logits, want, atol=1e-5, rtol=1e-5)


def test_chunked_attention_is_refused():
    config = hf.Llama4TextConfig(
        **TEXT, num_key_value_heads=2, head_dim=8, intermediate_size_mlp=48, num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    model = hf.Llama4ForCausalLM(config)
    with pytest.raises(ValueError, match=r"layer 0 .*chunked_overlay.* which subquad does not support"):
        sq.hf.swap(model, "full")


def test_patterns_that_a_model_overlays_are_refused():
    model = build("llama").model
    sq.hf.swap(model, "full")
    from transformers import masking_utils

    inputs = {"config": model.config, "inputs_embeds": torch.zeros(1, 5, 32), "attention_mask": None}
    inputs["past_key_values"] = None
    overlay = {"or_mask_function": lambda b, h, q, k: q == k}
    with pytest.raises(ValueError, match=r"masks attention by .*lambda.*, which subquad does not support"):
        masking_utils.create_causal_mask(**inputs, **overlay)
    if not hasattr(masking_utils, "blockwise_overlay"):  # older versions of transformers
        return
    blocks = {"block_sequence_ids": torch.zeros(1, 5, dtype=torch.long)}
    with pytest.raises(ValueError, match="masks attention by 'blockwise_overlay"):
        masking_utils.create_causal_mask(**inputs, **blocks)


def test_mixed_precision_model():
    case = build("bert")
    want = case.output()
    case.model.to(torch.bfloat16)
    sq.hf.swap(case.model, "full")
    have = case.output()
    assert have.dtype == torch.bfloat16
    torch.testing.assert_close(have.float(), want, atol=0.25, rtol=0.1)
