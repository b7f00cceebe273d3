"""Steps on a static cache are compiled once, whatever the method, and give the tokens that eager steps give."""

import json

import pytest
import torch
import transformers as hf
from torch import fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._inductor import compile_fx
from torch._inductor import config as inductor

from subquad.core.versions import cache_in
from subquad.hf import compiled_steps, step_backend
from subquad.hf.compiled_generation import GENERATED_PRODUCTS
from subquad.hf.products_of_one_row import SumsOfOneRow
from subquad.kernels import native
from tests.forks import output_of
from tests.library.hf.models import build

CASES = ["llama=full:kernel=subquad", "llama=clustered-tail", "gpt2=full"]
OP = "subquad.steps_forward.default"


@pytest.mark.slow
def test_steps_on_a_static_cache_are_compiled_once():
    results = json.loads(output_of("tests.library.hf.compiled_steps", *CASES).splitlines()[-1])
    for case, seen in zip(CASES, results, strict=True):
        assert (case, seen["loop"], seen["generate"]) == (case, True, True)
        assert (case, seen["graphs"], seen["graphs of generate"]) == (case, 1, 1)
        assert seen["unguarded"], case
        assert "skip_guard_eval_unsafe" in seen["another batch"], case
        if native.is_vectorised():
            assert (OP in seen["operators"]) == (case != "gpt2=full"), case
        if OP in seen["operators"]:  # a mask of its outputs, fused with the next product, would be read for each weight
            assert not [name for name in seen["operators"] if "masked_fill" in name], case


@pytest.mark.parametrize("length", [0, -3])
def test_a_request_has_a_token(length):
    with pytest.raises(ValueError, match=f"length={length}, but a request has at least 1 token"):
        compiled_steps(length)


@pytest.mark.parametrize("length", [100.0, "100", True, nn.Linear(2, 2)])
def test_a_length_is_a_whole_number(length, unchecked):
    with pytest.raises(TypeError, match=r"as the first argument, got .*; call sq\.hf\.compiled_steps\(2048\), or"):
        compiled_steps(length, 100)


def test_frozen_weights_are_refused_without_the_model_because_the_cache_would_be_frozen_too():
    with inductor.patch(freezing=True), pytest.raises(ValueError, match="constant of the compiled step"):
        compiled_steps(64)
    assert compiled_steps(64)["max_cache_len"] == 64


@pytest.mark.slow
def test_weights_are_frozen_and_the_cache_is_not():
    """In a model that has layers with a window and without."""
    seen = json.loads(output_of("tests.library.hf.frozen_steps", "gemma3").splitlines()[-1])
    assert seen == {"tokens": [True] * 6, "weights in the graph": 0}


def test_steps_are_compiled_by_the_backend_for_steps_unless_another_is_chosen():
    model = build("llama").model
    for frozen in (False, True):
        with inductor.patch(freezing=frozen):
            assert lookup_backend(compiled_steps(64, model)["compile_config"].backend) is step_backend
            for option, value in {"mode": "reduce-overhead", "options": {"trace.enabled": True}}.items():
                config = compiled_steps(64, model, **{option: value})["compile_config"]
                assert (config.backend, getattr(config, option)) == ("inductor", value)
            assert compiled_steps(64, model, backend="eager")["compile_config"].backend == "eager"


def test_the_options_can_be_printed_and_saved(tmp_path):
    settings = hf.GenerationConfig(**compiled_steps(64))
    settings.save_pretrained(tmp_path)
    assert '"max_cache_len": 64' in repr(settings)
    assert json.loads((tmp_path / "generation_config.json").read_text("utf-8"))["max_cache_len"] == 64


@pytest.mark.parametrize(
    ("frozen", "device", "patches"),
    [(False, "cpu", {}), (True, "cpu", GENERATED_PRODUCTS), (True, "meta", {})],
)
def test_products_of_several_rows_are_generated_where_weights_are_frozen_on_a_cpu(frozen, device, patches, monkeypatch):
    seen = []

    def compiled(graph, inputs, config_patches):
        assert isinstance(config_patches.pop("joint_custom_pre_pass"), SumsOfOneRow)
        seen.append(config_patches)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", compiled)
    with inductor.patch(freezing=frozen):
        step_backend(fx.symbolic_trace(nn.Linear(2, 2)), [torch.ones(2, 2, device=device), torch.ones(()), 3])
    assert seen == [patches]


def test_a_model_whose_cache_would_be_marked_is_refused():
    mamba = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1))
    for model, reason in ((build("t5").model, "has an encoder too"), (mamba, "LinearAttentionLayer")):
        with pytest.raises(ValueError, match=rf"{type(model).__name__}.*{reason}.*TORCHINDUCTOR_FREEZING=0"):
            compiled_steps(64, model)


def test_the_marks_are_gone_however_the_cache_is_allocated():
    case = build("gemma3")
    first, second = (cache_in(compiled_steps(64, case.model)) for _ in range(2))
    with torch.no_grad():
        case.model(**case.inputs, past_key_values=first)
    layer = first.layers[0]
    second.early_initialization(1, layer.num_heads, layer.k_head_dim, layer.keys.dtype, layer.keys.device)
    for cache in (first, second):
        tensors = [x for layer in cache.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
        assert len(tensors) == 3 * len(cache.layers)
        assert not any(hasattr(x, "_dynamo_static_input_type") for x in tensors)
