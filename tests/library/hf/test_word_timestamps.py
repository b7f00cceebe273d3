"""Whisper's word timestamps keep the methods of a swapped model."""

import pytest
import torch

import subquad as sq
from tests.library.hf.models import Case, build

METHODS = {"*encoder.layers*": "clustered:clusters=3", "*decoder*self_attn": "local:window=2"}


def whisper() -> Case:
    case = build("whisper")
    settings = case.model.generation_config
    settings.alignment_heads, settings.no_timestamps_token_id, settings.max_length = [[0, 0], [1, 2]], 50, 12
    case.model.config.median_filter_width = 3
    return case


def timestamps(case: Case, **options) -> dict[str, torch.Tensor]:
    made = case.model.generate(
        case.inputs["input_features"], return_timestamps=True, return_token_timestamps=True, **options
    )
    return {name: made[name] for name in ("sequences", "token_timestamps")}


def methods(model) -> list[str]:
    return [str(method) for method in sq.hf.describe(model).methods.values()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("part", "beams"), [("", 1), ("", 2), ("model", 1), ("model.encoder", 1), ("model.decoder", 1)]
)
def test_exact_attention_gives_the_models_own_timestamps(part, beams):
    case = whisper()
    want = timestamps(case, num_beams=beams)
    case.model.set_attn_implementation("sdpa")
    swapped = case.model.get_submodule(part)
    sq.hf.swap(swapped, "full")
    have = timestamps(case, num_beams=beams)
    assert bool(want["token_timestamps"].any())
    assert all(torch.equal(have[name], want[name]) for name in want)
    assert set(methods(swapped)) == {"full"}


def test_methods_stay_and_run_and_are_saved(tmp_path):
    case = whisper()
    sq.hf.swap(case.model, METHODS | {"*encoder_attn": "oracle-top:topk=2"})
    before = methods(case.model)
    assert set(before) == {"clustered:clusters=3", "local:window=2", "oracle-top:topk=2"}
    calls = []
    for bound in sq.hf.bounds(case.model).values():
        bound.register_forward_hook(lambda bound, *_: calls.append(bound.method.name))
    cut = timestamps(case)
    assert set(calls) == {"clustered", "local"}  # and exact attention, with its weights, in cross-attention
    assert methods(case.model) == before
    case.model(**case.inputs)
    assert "oracle-top" in calls
    case.model.save_pretrained(tmp_path)
    settings, case.model = case.model.generation_config, type(case.model).from_pretrained(tmp_path).eval()
    case.model.generation_config = settings
    assert methods(case.model) == before
    assert torch.equal(timestamps(case)["token_timestamps"], cut["token_timestamps"])


def test_weights_are_refused_where_no_timestamps_are_made():
    case = whisper()
    sq.hf.swap(case.model, "full")
    timestamps(case)
    for call in (case.model, case.model.model.encoder, case.model.generate):
        inputs = case.inputs if call is case.model else {"input_features": case.inputs["input_features"]}
        options = {"return_dict_in_generate": True} if call == case.model.generate else {}
        with pytest.raises(ValueError, match="output_attentions=True asks for attention weights"):
            call(**inputs, output_attentions=True, **options)


def test_generation_that_ends_before_its_first_call_leaves_the_methods():
    case = whisper()
    sq.hf.swap(case.model, METHODS)
    with pytest.raises(ValueError, match="max_new_tokens"):
        timestamps(case, max_new_tokens=10_000)
    case.model(**case.inputs)
    assert "clustered:clusters=3" in methods(case.model)


def test_another_attention_that_was_set_before_is_refused():
    case = whisper()
    sq.hf.swap(case.model, METHODS)
    case.model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation='sdpa' was set since"):
        timestamps(case)
    sq.hf.restore(case.model)
    timestamps(case)
