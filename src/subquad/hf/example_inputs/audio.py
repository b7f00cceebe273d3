"""Sound: samples, or frames of mel features."""

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


def bins(form: Form) -> int:
    """How many numbers one frame has."""
    return form.number(
        "num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "mel_bins", "feature_projection_input_dim"
    )


def frames(form: Form) -> int:
    """How many frames: as many as the encoder has positions for where it takes no other number."""
    fixed = form.number("max_source_positions", "max_length", default=0)
    return 2 * fixed if fixed else free_frames(form)


def free_frames(form: Form) -> int:
    """How many frames where any number will do."""
    return 8 * form.length


def time_by_mel(form: Form, stacked: int = 1) -> Tensor:
    """Spectra (B, frames, bins), with `stacked` frames joined into one."""
    return form.floats(form.batch, free_frames(form), stacked * bins(form))


def all_frames(form: Form) -> Tensor:
    """Which frames are real, ones where no padding is asked for."""
    return form.full_mask(free_frames(form))
