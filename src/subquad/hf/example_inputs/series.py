"""Time series."""

from torch import Tensor

from subquad.hf.example_inputs.form import Form


def past_length(form: Form) -> int:
    """The number of steps in the past: the context, and the steps that lags reach back."""
    lags = getattr(form.config, "lags_sequence", None) or [0]
    return form.number("context_length", "prediction_length") + max(lags)


def future_length(form: Form) -> int:
    """The number of steps to predict."""
    return form.number("prediction_length")


def values(form: Form, steps: int) -> Tensor:
    """The values of `steps` time steps, with an axis of channels where there are several."""
    size = form.number("input_size", default=1)
    return form.floats(form.batch, steps, size) if size > 1 else form.floats(form.batch, steps)


def times(form: Form, steps: int) -> Tensor:
    """Time features of `steps` time steps."""
    names = ("num_time_features", "num_dynamic_real_features")
    return form.floats(form.batch, steps, sum(form.number(name, default=0) for name in names))
