"""Sound: samples, or frames of mel features."""

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.hf.example_inputs.form import Form, configs


def samples(form: Form) -> int:
    """The number of samples that make `length` frames behind the model's convolutions."""
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
    """A mask of the samples that are real."""
    return form.mask(samples(form))


def bins(form: Form) -> int:
    """The number of values in one frame."""
    return form.number(
        "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "mel_bins", "feature_projection_input_dim"
    )


def frames(form: Form) -> int:
    """The number of frames: as many as the encoder has positions for if it accepts no other number."""
    fixed = form.number("max_source_positions", "max_length", default=0)
    return 2 * fixed if fixed else free_frames(form)


def free_frames(form: Form) -> int:
    """The number of frames if any number is accepted."""
    return 8 * form.length


def time_by_mel(form: Form, stacked: int = 1) -> Tensor:
    """Spectra (B, frames, bins), with `stacked` frames joined into one."""
    return form.floats(form.batch, free_frames(form), stacked * bins(form))


def stacked_frames(form: Form) -> Tensor:
    """Spectra (B, length, stacked · bins), where the config sets how many frames are joined into one."""
    return form.floats(form.batch, form.length, form.number("num_stacked_frames") * bins(form))


def channels_by_mel(form: Form) -> Tensor:
    """Spectra (B, frames, channels · bins)."""
    return time_by_mel(form, stacked=form.number("input_channels", default=1))


def chunk(form: Form) -> int:
    """The number of frames in a window of an encoder that cuts its frames into chunks."""
    return 2 * form.number("n_window")


def frames_in_chunk(form: Form) -> int:
    """The number of frames if any number is accepted that is less than a chunk.

    transformers counts 13 tokens for a whole chunk, as one of 100 frames has, whatever the config's `n_window`.
    """
    return min(free_frames(form), chunk(form) - 1)


def joined_frames(form: Form) -> Tensor:
    """Spectra (bins, frames of all items), less than a chunk of each item."""
    return form.floats(bins(form), form.batch * frames_in_chunk(form))


def joined_lengths(form: Form) -> Tensor:
    """The number of `joined_frames` of each item."""
    return torch.tensor([frames_in_chunk(form)] * form.batch)


def one_chunk(form: Form) -> Tensor:
    """Spectra (B, bins, frames) of one chunk."""
    return form.floats(form.batch, bins(form), chunk(form))


def frames_of_chunk(form: Form) -> Tensor:
    """A mask of the frames of `one_chunk` that are real: not the last ones."""
    return F.pad(form.full_mask(frames_in_chunk(form)), (0, chunk(form) - frames_in_chunk(form)))


def all_frames(form: Form) -> Tensor:
    """A mask of the frames that are real, all ones if no padding is asked for."""
    return form.full_mask(free_frames(form))
