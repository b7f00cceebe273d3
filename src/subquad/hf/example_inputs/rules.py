"""Which rule makes which parameter of a forward pass: by its name, and by model type where a name is not enough."""

from collections.abc import Callable
from typing import Any

from subquad.hf.example_inputs import audio, series, text, vision
from subquad.hf.example_inputs.form import Form

Rule = Callable[[Form], Any]

# What an attention mask covers where the main input is no text.
MASK_OF: dict[str, Rule] = {"input_values": audio.wave_mask, "input_features": audio.frame_mask}

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
}

# By model type: rules that differ from the above, and parameters that are left out (None) or given although optional.
BY_TYPE: dict[str, dict[str, Rule | None]] = {
    "audio-spectrogram-transformer": {"input_values": audio.spectrogram},
}
