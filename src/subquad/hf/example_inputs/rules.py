"""Rules that make the parameters of a forward pass: by name, and by model type if a name is not enough."""

from collections.abc import Callable
from typing import Any

import torch

from subquad.hf.example_inputs import audio, series, text, vision
from subquad.hf.example_inputs.form import Form

Rule = Callable[[Form], Any]
Rules = dict[str, Rule | None]

# A parameter of one of these names is given wherever forward has it. A rule may answer None: left out.
BY_NAME: dict[str, Rule] = {
    "input_ids": text.ids,
    "attention_mask": text.mask,
    "decoder_input_ids": text.decoder_ids,
    "decoder_attention_mask": text.decoder_mask,
    "pixel_values": vision.image,
    "input_values": audio.wave,
    "past_values": lambda form: series.values(form, series.past_length(form)),
    "past_time_features": lambda form: series.times(form, series.past_length(form)),
    "past_observed_mask": lambda form: torch.ones_like(series.values(form, series.past_length(form))),
    "future_values": lambda form: series.values(form, series.future_length(form)),
    "future_time_features": lambda form: series.times(form, series.future_length(form)),
    "mm_token_type_ids": text.token_kinds,
}

# The tokens that an attention mask covers if the main input is not text.
MASK_OF: dict[str, Rule] = {
    "input_values": audio.wave_mask,
    "input_features": lambda form: form.mask(audio.free_frames(form)),
}

# A parameter of one of these names is given where forward has no default for it.
IF_REQUIRED: dict[str, Rule] = {
    "pixel_values_videos": vision.video,
    "input_features": lambda form: form.floats(form.batch, audio.bins(form), audio.frames(form)),  # as Whisper's
    "image_grid_thw": vision.grid,
    "grid_thw": vision.grid,
    "hidden_states": vision.patches,
    "input_features_mask": audio.all_frames,
    "inputs_embeds": text.embedded,
    "flattened_patches": vision.numbered_rows,
    "qformer_input_ids": text.ids,
    "attention_mask": text.every_mask,
    "labels": lambda form: form.integers(0, form.number("num_labels", default=2), form.batch),
}

# Rules that differ from the above, and parameters that are left out (None) or given although optional: of one type, …
BY_TYPE: dict[str, Rules] = {
    "audio-spectrogram-transformer": {
        "input_values": lambda form: form.floats(form.batch, form.number("max_length", default=64), audio.bins(form)),
        "attention_mask": None,
    },
    "audioflamingo3_encoder": {"input_features_mask": lambda form: form.full_mask(audio.frames(form))},
    "blip_2_qformer": {
        "query_embeds": text.embedded,
        "encoder_hidden_states": lambda form: form.floats(
            form.batch, text.decoder_length(form), form.number("encoder_hidden_size", "hidden_size")
        ),
    },
    "bros": {"bbox": text.boxes},
    "decision_transformer": {
        "states": lambda form: form.floats(form.batch, form.length, form.number("state_dim")),
        "actions": lambda form: form.floats(form.batch, form.length, form.number("act_dim")),
        "rewards": lambda form: form.floats(form.batch, form.length, 1),
        "returns_to_go": lambda form: form.floats(form.batch, form.length, 1),
        "timesteps": lambda form: torch.arange(form.length).expand(form.batch, -1),
    },
    "dia": {"decoder_input_ids": text.channel_ids},
    "dia_decoder": {"input_ids": text.channel_ids},
    "florence_vision": {"hidden_states": vision.image},
    "fun_asr_nano_encoder": {
        "input_features": audio.stacked_frames,
        "input_features_mask": lambda form: form.full_mask(form.length),
    },
    "glm_image": {"pixel_values": None, "image_grid_thw": None},
    "idefics2_perceiver": {"context": text.embedded, "attention_mask": lambda form: form.full_mask(form.length)},
    "kimi_k25_vision": {"pixel_values": vision.patch_images},
    "kosmos-2": {"pixel_values": vision.image, "image_embeds_position_mask": text.image_tokens},
    "molmo2_vision": {"pixel_values": vision.patch_rows},
    "oneformer": {  # the text states its task
        "task_inputs": lambda form: form.ids(
            form.number("task_seq_len", "max_seq_len"), form.number("text_encoder_vocab_size", "vocab_size")
        ),
    },
    "phi4_multimodal_audio": {"hidden_states": audio.time_by_mel, "mask": audio.all_frames},
    "qwen3_asr_encoder": {"input_features": audio.one_chunk, "input_features_mask": audio.frames_of_chunk},
    "qwen3_omni_moe_audio_encoder": {
        "input_features": audio.joined_frames,
        "feature_lens": audio.joined_lengths,
        "attention_mask": None,
    },
    "speech-encoder-decoder": {"inputs": audio.wave, "attention_mask": audio.wave_mask},
    "speech_to_text": {"input_features": audio.channels_by_mel},
    "timesfm": {  # nothing is padding
        "past_values_padding": lambda form: torch.zeros(form.batch, series.past_length(form), dtype=torch.long),
        "freq": lambda form: torch.zeros(form.batch, 1, dtype=torch.long),
    },
    "udop": {"pixel_values": None, "bbox": lambda form: text.boxes(form) / 100},  # shares of the page
    "video_llama_3_vision": {
        "pixel_values": vision.patches,
        "merge_sizes": lambda form: torch.ones(form.batch, dtype=torch.long),
    },
    "xclip_vision_model": {"pixel_values": lambda form: vision.video(form).flatten(0, 1)},
}

# … and of several.
_SHARED: list[tuple[str, Rules]] = [
    ("colqwen2 deepseek_vl_hybrid granite_docling mllama molmo2 nemotron_h_omni", {"pixel_values": None}),
    (
        "cosmos3_edge_vision dots3_note_vision_encoder glm_image_vision hunyuan_vl_vision lfm3_vl_vision "
        "minimax_m3_vl_vision muse_glimmer_vision muse_spark_vision",
        {"pixel_values": vision.patches},
    ),
    (
        "lfm2_vl siglip2 siglip2_vision_model",
        {
            "pixel_values": vision.patch_rows,
            "pixel_attention_mask": vision.patch_mask,
            "spatial_shapes": vision.spatial_shapes,
        },
    ),
    ("kosmos_2_5_vision_model pix2struct pix2struct_vision_model", {"flattened_patches": vision.numbered_rows}),
    ("instructblipvideo timesformer videomae vivit xclip", {"pixel_values": vision.video}),
    (
        "colmodernvbert idefics idefics2 idefics3 modernvbert smolvlm",  # with an axis of images
        {"pixel_values": lambda form: vision.image(form)[:, None]},
    ),
    (
        "lightglue superglue",  # two images an item
        {"pixel_values": lambda form: form.floats(form.batch, 2, vision.channels(form), *vision.image_size(form))},
    ),
    (
        "dac encodec mimi mimi_encoder pe_audio pe_audio_encoder pocket_tts_audio_tokenizer "
        "pocket_tts_audio_tokenizer_encoder xcodec",  # with an axis of channels
        {
            "input_values": lambda form: audio.wave(form)[:, None].expand(
                -1, form.number("audio_channels", default=1), -1
            )
        },
    ),
    ("csm muse_spark", {"input_values": None}),
    (
        "canary cohere_asr lasr_ctc lasr_encoder nemotron3_5_asr nemotron3_5_transcribe_asr_audio "
        "nemotron3_5_transcribe_audio nemotron3_diarization nemotron3_diarization_audio nemotron_asr_streaming "
        "nemotron_asr_streaming_encoder parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt wav2vec2-bert",
        {"input_features": audio.time_by_mel},
    ),
    (
        "granite_speech5_ctc granite_speech5_encoder",
        {"input_features": lambda form: audio.time_by_mel(form, stacked=4)},
    ),
    (
        "qwen2_5_omni_audio_encoder",  # the frames of all items, one after the other
        {
            "input_features": lambda form: form.floats(audio.bins(form), form.batch * audio.free_frames(form)),
            "feature_lens": lambda form: torch.tensor([audio.free_frames(form)] * form.batch),
            "attention_mask": None,
        },
    ),
    ("moss_transcribe_diarize_audio qwen2_audio_encoder voxtral_encoder", {"attention_mask": None}),
    (
        "patchtsmixer patchtst",  # with an axis of channels, even if there is one
        {
            "past_values": lambda form: form.floats(
                form.batch, series.past_length(form), form.number("num_input_channels", default=1)
            ),
            "past_observed_mask": None,
            "future_values": None,
        },
    ),
]
BY_TYPE |= {model_type: rules for model_types, rules in _SHARED for model_type in model_types.split()}
