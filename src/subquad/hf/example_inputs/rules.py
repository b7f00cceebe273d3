"""Which rule makes which parameter of a forward pass: by its name, and by model type where a name is not enough."""

from collections.abc import Callable
from typing import Any

from subquad.hf.example_inputs import audio, series, text, vision
from subquad.hf.example_inputs.form import Form

Rule = Callable[[Form], Any]

# A parameter of one of these names is given wherever forward has it. A rule may answer None: left out.
BY_NAME: dict[str, Rule] = {
    "input_ids": text.ids,
    "attention_mask": text.mask,
    "decoder_input_ids": text.decoder_ids,
    "decoder_attention_mask": text.decoder_mask,
    "pixel_values": vision.image,
    "input_values": audio.wave,
    "past_values": series.past,
    "past_time_features": series.past_times,
    "past_observed_mask": series.observed,
    "future_values": series.future,
    "future_time_features": series.future_times,
    "mm_token_type_ids": text.token_kinds,
}

# What an attention mask covers where the main input is no text.
MASK_OF: dict[str, Rule] = {"input_values": audio.wave_mask, "input_features": audio.frame_mask}

# A parameter of one of these names is given where forward has no default for it.
IF_REQUIRED: dict[str, Rule] = {
    "pixel_values_videos": vision.video,
    "input_features": audio.mel_by_time,
    "image_grid_thw": vision.grid,
    "grid_thw": vision.grid,
    "hidden_states": vision.patches,
    "input_features_mask": audio.all_frames,
    "inputs_embeds": text.embedded,
    "flattened_patches": vision.numbered_rows,
    "qformer_input_ids": text.ids,
    "attention_mask": text.every_mask,
    "labels": text.classes,
}

# Inputs that several model types share.
_PATCH_ROWS: dict[str, Rule | None] = {
    "pixel_values": vision.patch_rows,
    "pixel_attention_mask": vision.patch_mask,
    "spatial_shapes": vision.spatial_shapes,
}
_VIDEO: dict[str, Rule | None] = {"pixel_values": vision.video}
_IMAGES: dict[str, Rule | None] = {"pixel_values": vision.images}
_PAIRS: dict[str, Rule | None] = {"pixel_values": vision.pairs}
_WAVE: dict[str, Rule | None] = {"input_values": audio.channels_of_wave}
_FRAMES: dict[str, Rule | None] = {"input_features": audio.time_by_mel}
_NUMBERED: dict[str, Rule | None] = {"flattened_patches": vision.numbered_rows}
_TEXT: dict[str, Rule | None] = {"pixel_values": None}
_NO_MASK: dict[str, Rule | None] = {"attention_mask": None}
_PACKED_MEL: dict[str, Rule | None] = {
    "input_features": audio.packed_mel,
    "feature_lens": audio.frame_counts,
    "attention_mask": None,
}
_CHANNELS: dict[str, Rule | None] = {
    "past_values": series.past_channels,
    "past_observed_mask": None,
    "future_values": None,
}

# By model type: rules that differ from the above, and parameters that are left out (None) or given although optional.
BY_TYPE: dict[str, dict[str, Rule | None]] = {
    "audio-spectrogram-transformer": {"input_values": audio.spectrogram, "attention_mask": None},
    "audioflamingo3_encoder": {"input_features_mask": audio.fixed_all_frames},
    "colqwen2": _TEXT,
    "deepseek_vl_hybrid": _TEXT,
    "glm_image": _TEXT | {"image_grid_thw": None},
    "glm_image_vision": {"pixel_values": vision.patches},
    "instructblipvideo": _VIDEO,
    "kosmos-2": {"pixel_values": vision.image, "image_embeds_position_mask": text.image_places},
    "mllama": _TEXT,
    "moss_transcribe_diarize_audio": _NO_MASK,
    "muse_spark": {"input_values": None},
    "nemotron3_5_asr": _FRAMES,
    "nemotron3_5_transcribe_asr_audio": _FRAMES,
    "nemotron3_5_transcribe_audio": _FRAMES,
    "nemotron3_diarization": _FRAMES,
    "nemotron3_diarization_audio": _FRAMES,
    "nemotron_asr_streaming": _FRAMES,
    "nemotron_asr_streaming_encoder": _FRAMES,
    "nemotron_h_omni": _TEXT,
    "oneformer": {"task_inputs": text.task_ids},
    "patchtsmixer": _CHANNELS,
    "patchtst": _CHANNELS,
    "phi4_multimodal_audio": {"hidden_states": audio.time_by_mel, "mask": audio.all_frames},
    "qwen2_5_omni_audio_encoder": _PACKED_MEL,
    "qwen2_audio_encoder": _NO_MASK,
    "qwen3_omni_moe_audio_encoder": _PACKED_MEL,
    "timesfm": {"past_values_padding": series.none_padded, "freq": series.frequency},
    "udop": _TEXT | {"bbox": text.unit_boxes},
    "voxtral_encoder": _NO_MASK,
    "wav2vec2-bert": _FRAMES,
    "blip_2_qformer": {"query_embeds": text.embedded, "encoder_hidden_states": text.encoded},
    "csm": {"input_values": None},
    "decision_transformer": {
        "states": series.states,
        "actions": series.actions,
        "rewards": series.rewards,
        "returns_to_go": series.rewards,
        "timesteps": series.steps,
    },
    "dia": {"decoder_input_ids": text.channel_ids},
    "dia_decoder": {"input_ids": text.channel_ids},
    "dots3_note_vision_encoder": {"pixel_values": vision.patches},
    "florence_vision": {"hidden_states": vision.image},
    "idefics2_perceiver": {"context": text.embedded, "attention_mask": text.real_tokens},
    "mimi": _WAVE,
    "molmo2": _TEXT,
    "molmo2_vision": {"pixel_values": vision.patch_rows},
    "pocket_tts_audio_tokenizer": _WAVE,
    "speech-encoder-decoder": {"inputs": audio.wave, "attention_mask": audio.wave_mask},
    "video_llama_3_vision": {"pixel_values": vision.patches, "merge_sizes": vision.ones_each},
    "bros": {"bbox": text.boxes},
    "canary": _FRAMES,
    "cohere_asr": _FRAMES,
    "colmodernvbert": _IMAGES,
    "cosmos3_edge_vision": {"pixel_values": vision.patches},
    "dac": _WAVE,
    "encodec": _WAVE,
    "granite_docling": _TEXT,
    "granite_speech5_ctc": {"input_features": audio.stacked_mel},
    "granite_speech5_encoder": {"input_features": audio.stacked_mel},
    "hunyuan_vl_vision": {"pixel_values": vision.patches},
    "idefics": _IMAGES,
    "idefics2": _IMAGES,
    "idefics3": _IMAGES,
    "kimi_k25_vision": {"pixel_values": vision.patch_images},
    "kosmos_2_5_vision_model": _NUMBERED,
    "lasr_ctc": _FRAMES,
    "lasr_encoder": _FRAMES,
    "lfm2_vl": _PATCH_ROWS,
    "lfm3_vl_vision": {"pixel_values": vision.patches},
    "lightglue": _PAIRS,
    "mimi_encoder": _WAVE,
    "minimax_m3_vl_vision": {"pixel_values": vision.patches},
    "modernvbert": _IMAGES,
    "muse_glimmer_vision": {"pixel_values": vision.patches},
    "muse_spark_vision": {"pixel_values": vision.patches},
    "parakeet_ctc": _FRAMES,
    "parakeet_encoder": _FRAMES,
    "parakeet_rnnt": _FRAMES,
    "parakeet_tdt": _FRAMES,
    "pe_audio": _WAVE,
    "pe_audio_encoder": _WAVE,
    "pix2struct": _NUMBERED,
    "pix2struct_vision_model": _NUMBERED,
    "pocket_tts_audio_tokenizer_encoder": _WAVE,
    "siglip2": _PATCH_ROWS,
    "siglip2_vision_model": _PATCH_ROWS,
    "smolvlm": _IMAGES,
    "superglue": _PAIRS,
    "timesformer": _VIDEO,
    "videomae": _VIDEO,
    "vivit": _VIDEO,
    "xclip": _VIDEO,
    "xclip_vision_model": {"pixel_values": vision.frames},
    "xcodec": _WAVE,
}
