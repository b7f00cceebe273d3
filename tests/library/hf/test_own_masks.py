"""Models whose own code makes masks, or computes with them, and models of sound whose inputs are hard to make.

Each small random model runs as with its own attention, eager and SDPA, or is refused with what to give.
"""

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

import subquad as sq
from subquad.hf.example_inputs import example_inputs
from subquad.hf.probe import find_layers
from tests.library.hf.models import need_the_interface, need_transformers
from tests.library.hf.survey.outputs import forward
from tests.library.hf.survey.zoo import small_model

# Block-diagonal masks of packed images, a mask that a pooler repeats, causal masks with padding, and sound.
TYPES = (
    "pixtral", "mistral3", "lighton_ocr", "siglip2", "siglip2_vision_model", "lfm2_vl", "kosmos-2",
    "kosmos_2_text_model", "timesfm", "speech_to_text", "qwen3_omni_moe_thinker", "qwen3_omni_moe_audio_encoder",
    "qwen3_asr_encoder", "fun_asr_nano_encoder",
)  # fmt: skip


IMAGES = {
    "patch_size": 8,
    "image_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
}
SOUND = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "conv_channels": 32,
    "max_target_positions": 40, "pad_token_id": 1,
}  # fmt: skip


def assert_same(have: dict[str, Tensor], want: dict[str, Tensor], inputs: dict[str, Tensor]) -> None:
    """All outputs agree to 1e-5 of the largest number, at real tokens where a mask of the inputs says which are."""
    assert have.keys() == want.keys()
    masks = {tuple(x.shape): x.bool() for name, x in inputs.items() if name.endswith("attention_mask")}
    for name, wanted in want.items():
        valid = masks.get(tuple(wanted.shape[:2]))
        a, b = (x if valid is None else x[valid] for x in (have[name], wanted))
        torch.testing.assert_close(a, b, atol=1e-5 * float(b.abs().max()), rtol=0)


def compare(model: hf.PreTrainedModel, *cases: dict[str, Tensor]) -> None:
    """Run these inputs with the model's own attention and with `full` swapped in."""
    for implementation in ("eager", "sdpa") if model._supports_sdpa else ("eager",):
        sq.hf.restore(model)
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            wanted = [forward(model, inputs) for inputs in cases]
            sq.hf.swap(model, "full")
            for inputs, want in zip(cases, wanted, strict=True):
                assert_same(forward(model, inputs), want, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_as_with_its_own_attention(model_type: str):
    model = small_model(model_type)
    cases = []
    for batch in (1, 2):
        for side in ("none", "right", "left"):
            try:
                cases.append(example_inputs(model, batch=batch, length=9, padding=side))
            except ValueError:  # it takes no mask
                assert side != "none"
    compare(model, *cases)


# ---------------------------------------------------------------------- images that are packed


def pixtral() -> hf.PixtralVisionModel:
    torch.manual_seed(0)
    return hf.PixtralVisionModel(hf.PixtralVisionConfig(**IMAGES)).eval()


def images(*sizes: tuple[int, int]) -> dict[str, Tensor]:
    """Images of these sizes, padded to the largest one's."""
    pixels = torch.randn(len(sizes), 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def test_images_of_pixtral_do_not_see_each_other():
    model = pixtral()
    batch = images((64, 64), (32, 48), (8, 8))
    compare(model, batch, images((64, 64)), images((40, 24), (40, 24)))
    together = model(**batch).last_hidden_state
    other = {**batch, "pixel_values": batch["pixel_values"].clone()}
    other["pixel_values"][1] += 1
    changed = (model(**other).last_hidden_state - together).abs().amax((0, 2)) > 0
    assert changed.nonzero()[:, 0].tolist() == list(range(64, 64 + 24))


def test_another_method_runs_in_pixtral_and_keeps_images_apart():
    model = pixtral()
    sq.hf.swap(model, "i-clustered:clusters=4,topk=3")
    pair, alone = images((64, 64), (32, 48)), images((64, 64))
    alone["pixel_values"] = pair["pixel_values"][:1]
    with torch.no_grad():
        together, single = (model(**batch).last_hidden_state for batch in (pair, alone))
    torch.testing.assert_close(together[:, :64], single, atol=1e-5, rtol=1e-5)


def test_the_layers_of_pixtral_are_neither_causal_nor_windowed():
    assert {(layer.causal, layer.window, layer.cross) for layer in find_layers(pixtral())} == {(False, None, False)}


# ---------------------------------------------------------------------- a pooler that computes with the mask


def test_the_pooler_of_siglip2_sees_its_mask_with_and_without_padding():
    model = small_model("siglip2_vision_model")
    padded = example_inputs(model, padding="right")
    compare(model, padded)
    pooled = model(**padded).pooler_output
    hidden = padded["pixel_attention_mask"] == 0
    assert hidden.any()
    padded["pixel_values"][hidden] += 10
    torch.testing.assert_close(model(**padded).pooler_output, pooled, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------- sound


@pytest.mark.parametrize(
    "settings",
    [
        {"input_feat_per_channel": 24, "max_source_positions": 20},
        {"input_feat_per_channel": 24, "input_channels": 2},
        {"max_source_positions": 6000},
    ],
)
def test_speech_to_text_of_any_number_of_bins_and_channels(settings: dict[str, int]):
    torch.manual_seed(0)
    model = hf.Speech2TextForConditionalGeneration(hf.Speech2TextConfig(**SOUND, **settings)).eval()
    frames = torch.randn(2, 32, model.config.input_feat_per_channel * model.config.input_channels)
    mask = torch.ones(2, 32, dtype=torch.long)
    mask[1, 20:] = 0
    batch = {"input_features": frames, "decoder_input_ids": torch.randint(3, 99, (2, 5))}
    compare(model, batch, batch | {"attention_mask": mask}, {name: x[:1] for name, x in batch.items()})


def thinker(n_window: int = 4, **tokens: int) -> Qwen3OmniMoeThinkerForConditionalGeneration:
    rope = {"mrope_section": [2, 1, 1], "rope_type": "default", "interleaved": True, "rope_theta": 10_000.0}
    text = {
        "rope_parameters": rope, "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16,
        "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    audio = {
        "d_model": 32, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "encoder_layers": 2, "num_mel_bins": 20,
        "max_source_positions": 12 if n_window == 4 else 100, "n_window": n_window, "n_window_infer": 8 * n_window,
        "output_dim": 32, "downsample_hidden_size": 16,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 14,
        "spatial_merge_size": 1, "out_hidden_size": 32, "num_position_embeddings": 36, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3OmniMoeThinkerConfig(
        text_config=text, audio_config=audio, vision_config=vision, image_token_id=5, video_token_id=6,
        audio_token_id=7, audio_start_token_id=9, **tokens,
    )  # fmt: skip
    return Qwen3OmniMoeThinkerForConditionalGeneration(config).eval()


@pytest.mark.slow
def test_a_thinker_runs_on_text_images_and_sound():
    model = thinker(n_window=50, vision_start_token_id=8)
    with_image = example_inputs(model)
    assert "pixel_values" in with_image
    lengths = [100, 37]
    sounds = torch.zeros(2, 2 * 50, dtype=torch.long)
    for sound, length in zip(sounds, lengths, strict=True):
        sound[:length] = 1
    ids = torch.randint(10, 99, (2, 20))
    ids[:, 0], ids[0, 1:14], ids[1, 1:6] = 9, 7, 7  # 13 tokens of 100 frames, 5 of 37
    heard = {"input_ids": ids, "input_features": torch.randn(2, 20, 100), "feature_attention_mask": sounds}
    heard["attention_mask"] = torch.ones_like(ids)
    compare(model, with_image, example_inputs(model, padding="left"), heard)
    assert all(layer.sizes is not None for layer in find_layers(model)), "a layer was not tried"


def test_a_thinker_without_a_token_that_starts_images_is_tried_on_text():
    """Its own forward pass needs that token wherever it is given an attention mask."""
    need_transformers(5, 9, what="passes lengths to the layers that read sound, which are refused for it")
    model = thinker()
    ids = torch.randint(10, 99, (2, 9))
    with pytest.raises(AttributeError, match="vision_start_token_id"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    compare(model, {"input_ids": ids}, {"input_ids": ids[:1]})


# ---------------------------------------------------------------------- refusals


def test_a_model_that_does_not_run_names_the_inputs_to_give():
    model = hf.Speech2TextModel(hf.Speech2TextConfig(**SOUND, input_feat_per_channel=24)).eval()
    with pytest.raises(
        ValueError, match=r"on the inputs that were given to try it .*sq.hf.swap\(model, method, inputs"
    ):
        sq.hf.swap(model, "full", inputs={"input_features": torch.randn(2, 8, 25)})


def test_a_model_without_example_inputs_names_the_inputs_to_give():
    with pytest.raises(
        ValueError, match=r"no rule makes 'latents'; give a small batch .*sq.hf.swap\(model, method, inp"
    ):
        sq.hf.swap(small_model("mimi_decoder"), "full")


@pytest.mark.parametrize("model_type", ["swin", "parakeet_encoder", "eomt"])
def test_a_mask_that_is_none_is_refused_with_the_reason(model_type: str):
    model = small_model(model_type)
    need_the_interface(model)
    with pytest.raises(
        ValueError, match=r"was given an attention mask of shape .*(a bias on the logits|segments or a w)"
    ):
        sq.hf.swap(model, "full")
