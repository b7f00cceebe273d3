"""Sound: samples, or frames of mel features."""

import torch
from torch import Tensor

from subquad.hf.example_inputs.form import Form, configs


def samples(form: Form) -> int:
    """How many samples make `length` frames behind the model's convolutions."""
    strides = _list(form, "conv_stride") or _list(form, "upsampling_ratios") or [8, 8, 5]
    kernels = _list(form, "conv_kernel") or strides
    count = form.length
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=False):
        count = (count - 1) * stride + kernel
    return count


def _list(form: Form, name: str) -> list[int]:
    values = (vars(config).get(name) for config in configs(form.config))
    return next((list(v) for v in values if isinstance(v, list | tuple)), [])


def wave(form: Form) -> Tensor:
    """One channel of samples."""
    return form.floats(form.batch, samples(form))


def wave_mask(form: Form) -> Tensor | None:
    """Which samples are real."""
    return form.mask(samples(form))


def channels_of_wave(form: Form) -> Tensor:
    """Samples on an axis of channels."""
    return wave(form)[:, None].expand(-1, form.number("audio_channels", default=1), -1)


BINS = (
    "input_dim", "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "mel_bins",
    "feature_projection_input_dim", "input_size",
)  # fmt: skip


def bins(form: Form) -> int:
    """How many numbers one frame has."""
    return form.number(
        "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "mel_bins", "feature_projection_input_dim"
    )


def frames(form: Form) -> int:
    """How many frames: as many as the encoder has positions for where it takes no other number."""
    fixed = form.number("max_source_positions", "max_length", default=0)
    return 2 * fixed if fixed else 8 * form.length


def mel_by_time(form: Form) -> Tensor:
    """(B, bins, frames), as Whisper takes them."""
    return form.floats(form.batch, bins(form), frames(form))


def time_by_mel(form: Form) -> Tensor:
    """(B, frames, bins)."""
    return form.floats(form.batch, 8 * form.length, bins(form))


def frame_mask(form: Form) -> Tensor | None:
    """Which frames are real."""
    return form.mask(8 * form.length)


def fixed_frame_mask(form: Form) -> Tensor | None:
    """Which frames are real, where their number is fixed."""
    return form.mask(frames(form))


def spectrogram(form: Form) -> Tensor:
    """(B, frames, bins) of the size that an audio spectrogram transformer is made for."""
    return form.floats(form.batch, form.number("max_length", default=64), bins(form))


def all_frames(form: Form) -> Tensor:
    """Which frames are real, ones where no padding is asked for."""
    return form.full_mask(8 * form.length)


def fixed_all_frames(form: Form) -> Tensor:
    """Which frames are real, where their number is fixed."""
    return form.full_mask(frames(form))


def packed_mel(form: Form) -> Tensor:
    """(bins, frames of all items), one item after the other."""
    return form.floats(bins(form), form.batch * 8 * form.length)


def frame_counts(form: Form) -> Tensor:
    """How many frames each item has."""
    return torch.tensor([8 * form.length] * form.batch)


def stacked_mel(form: Form) -> Tensor:
    """(B, frames, 4 · bins): four frames as one."""
    return form.floats(form.batch, 8 * form.length, 4 * bins(form))
