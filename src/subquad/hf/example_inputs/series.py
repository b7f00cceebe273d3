"""Time series."""

import torch
from torch import Tensor

from subquad.hf.example_inputs.form import Form


def past_length(form: Form) -> int:
    """How many steps the past has: the context, and what lags reach back."""
    lags = getattr(form.config, "lags_sequence", None) or [0]
    return form.number("context_length", "prediction_length") + max(lags)


def past(form: Form) -> Tensor:
    """The values of the past."""
    size = form.number("input_size", default=1)
    shape = (form.batch, past_length(form))
    return form.floats(*shape, size) if size > 1 else form.floats(*shape)


def past_channels(form: Form) -> Tensor:
    """The values of the past on an axis of channels, even if there is one."""
    return form.floats(form.batch, past_length(form), form.number("num_input_channels", default=1))


def past_times(form: Form) -> Tensor:
    """Features of the past's steps."""
    return form.floats(form.batch, past_length(form), _features(form))


def observed(form: Form) -> Tensor:
    """Which values are known: all."""
    return torch.ones_like(past(form))


def future(form: Form) -> Tensor:
    """The values to predict."""
    size = form.number("input_size", default=1)
    shape = (form.batch, form.number("prediction_length"))
    return form.floats(*shape, size) if size > 1 else form.floats(*shape)


def future_times(form: Form) -> Tensor:
    """Features of the steps to predict."""
    return form.floats(form.batch, form.number("prediction_length"), _features(form))


def _features(form: Form) -> int:
    return form.number("num_time_features", default=0) + form.number("num_dynamic_real_features", default=0)


def none_padded(form: Form) -> Tensor:
    """Zeros: no step of the past is padding."""
    return torch.zeros(form.batch, past_length(form))


def frequency(form: Form) -> Tensor:
    """The lowest class of frequency."""
    return torch.zeros(form.batch, 1, dtype=torch.long)


# ---------------------------------------------------------------------- what a decision transformer acts on


def states(form: Form) -> Tensor:
    """What is seen at each step."""
    return form.floats(form.batch, form.length, form.number("state_dim"))


def actions(form: Form) -> Tensor:
    """What is done at each step."""
    return form.floats(form.batch, form.length, form.number("act_dim"))


def rewards(form: Form) -> Tensor:
    """One number at each step."""
    return form.floats(form.batch, form.length, 1)


def steps(form: Form) -> Tensor:
    """0, 1, 2, …"""
    return torch.arange(form.length).expand(form.batch, -1)
