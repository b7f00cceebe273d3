"""Example inputs: valid for the model, of the sizes asked for, the same for the same seed."""

import pytest
import torch
import transformers as hf

from subquad.hf.example_inputs import example_inputs
from tests.library.hf.models import BUILDERS, build
from tests.library.hf.survey.zoo import small_model


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in ("vit", "whisper", "wav2vec2")])
def test_texts_run_and_are_padded_on_the_side_asked_for(name, padding):
    model = build(name).model
    inputs = example_inputs(model, batch=3, length=8, padding=padding)
    assert inputs["input_ids"].shape == (3, 8)
    if padding == "none":
        assert "attention_mask" not in inputs
    else:
        valid = inputs["attention_mask"].bool()
        assert valid[:-1].all()
        assert valid[-1].tolist() == ([True] * 4 + [False] * 4 if padding == "right" else [False] * 4 + [True] * 4)
        assert (inputs["input_ids"][~valid] == model.config.pad_token_id).all()
    with torch.no_grad():
        model(**inputs)


def test_an_encoder_and_its_decoder_have_different_lengths():
    inputs = example_inputs(build("t5").model, length=7)
    assert inputs["decoder_input_ids"].shape[1] != inputs["input_ids"].shape[1] == 7


def test_ids_avoid_special_tokens():
    config = hf.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=[2, 5],
    )  # fmt: skip
    ids = example_inputs(hf.LlamaForCausalLM(config), batch=8, length=64)["input_ids"]
    assert set(ids.unique().tolist()) == {3, 4, 6, 7}


def test_the_seed_decides():
    model = build("bert").model
    state = torch.get_rng_state()
    first, again, other = (example_inputs(model, seed=seed)["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_sound_and_images_have_the_size_of_the_model():
    whisper = example_inputs(build("whisper").model)
    assert whisper["input_features"].shape == (2, 8, 40)
    assert example_inputs(build("vit").model)["pixel_values"].shape == (2, 3, 32, 32)
    speech = build("wav2vec2").model
    with torch.no_grad():
        assert speech(**example_inputs(speech, length=11, padding="right")).last_hidden_state.shape[1] == 11


@pytest.mark.parametrize("model_type", ["qwen2_vl", "gemma3", "llava"])
def test_text_has_as_many_image_tokens_as_the_image_has_features(model_type):
    model = small_model(model_type)
    inputs = example_inputs(model, length=7)
    assert "pixel_values" in inputs
    assert (inputs["input_ids"] == model.config.image_token_id).sum(1).tolist() == [
        inputs["input_ids"].shape[1] - 7
    ] * 2
    with torch.no_grad():
        model(**inputs)


def test_what_cannot_be_made_is_said():
    with pytest.raises(ValueError, match=r"ViTModel \(vit\): padding='left', but its forward pass has no attention m"):
        example_inputs(build("vit").model, padding="left")
    with pytest.raises(ValueError, match="padding='both', but it must be one of none, right, left"):
        example_inputs(build("bert").model, padding="both")

    class Other(hf.BertModel):
        def forward(self, input_ids, colours):
            return colours

    with pytest.raises(ValueError, match=r"no example inputs for Other \(bert\): no rule makes 'colours'"):
        example_inputs(Other(build("bert").model.config))
