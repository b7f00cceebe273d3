"""Metrics of a module's closeness to the exact output: by name, the user's own, or a score of the output."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from subquad.core.errors import InputError
from subquad.core.spelling import instead
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.measure.module_calls import ModuleCall

Metric = Callable[[Any, Any], Any]  # of an output and the exact output; larger is closer
Score = Callable[[Any, Any], Any]  # of an output and its input; larger is better


@dataclass(frozen=True)
class Judge:
    """The function by which outputs are judged, and the least fidelity that is accepted.

    Of a metric, the fidelity is its mean over the inputs. Of a score, it is 1 − (mean of exact attention − mean).
    """

    name: str
    function: Callable[[Any, Any], Any]
    is_score: bool
    min_fidelity: float

    @property
    def may_be_binary(self) -> bool:
        """True if the function may only tell right from wrong, as the user's may; metrics with a name are graded."""
        return self.function not in METRICS.values()

    def value(self, output: Any, exact: Any, call: ModuleCall) -> float:
        """The metric or the score of an output.

        Raises:
            TypeError: it is not a number.
        """
        return self.number(output, call.value if self.is_score else exact)

    def number(self, output: Any, other: Any) -> float:
        """The number that the function returns for an output and the exact output or, of a score, the input.

        Raises:
            TypeError: it is not a number.
        """
        value = self.function(output, other)
        if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
            return float(value)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{self.name} must return a number, but it returned {kind}") from None

    def reference(self, exact: Any, call: ModuleCall) -> float:
        """The value of the exact output itself.

        Raises:
            InputError: it is not finite, or less than what is asked for, so that no method could reach it.
        """
        value = self.value(exact, exact, call)
        if not math.isfinite(value):
            raise InputError(
                f"{self.name} is {value} for the exact output of input {call.number}, but it must be a finite number"
            )
        if not self.is_score and value < self.min_fidelity:
            raise InputError(
                f"{self.name} is {value:g} for the exact output itself, but min_fidelity is {self.min_fidelity:g}; a "
                "metric is larger where outputs are closer, and min_fidelity is in its units"
            )
        return value

    def fidelity(self, values: Sequence[float], references: Sequence[float]) -> float:
        """The fidelity on some inputs, from their values and those of the exact outputs."""
        return 1.0 - (mean(references) - mean(values)) if self.is_score else mean(values)

    def accepted_loss(self, references: Sequence[float]) -> float:
        """The most by which the mean value may be below the exact one."""
        return 1.0 - self.min_fidelity if self.is_score else mean(references) - self.min_fidelity


def judge_of(metric: str | Metric | None, score: Score | None, min_fidelity: float) -> Judge:
    """The judge that the arguments of `sq.compare` and `sq.plan` name.

    Raises:
        InputError: both are given, no metric has that name, or `min_fidelity` is out of its range.
        TypeError: a metric or score that is not a function, or a `min_fidelity` that is not a number.
    """
    if isinstance(min_fidelity, bool) or not isinstance(min_fidelity, int | float) or math.isnan(min_fidelity):
        raise TypeError(f"min_fidelity must be a number, got {min_fidelity!r}")
    if metric is not None and score is not None:
        raise InputError("metric and score are both given; give one of them")
    if score is not None:
        if not callable(score):
            raise TypeError(f"score must be a function of the output and the input, got {score!r}")
        _check_share(min_fidelity)
        return Judge(_name_of("score", score), score, True, float(min_fidelity))
    if metric is None or isinstance(metric, str):
        name = metric or "cosine"
        if name not in METRICS:
            raise InputError(f"no metric {name!r}{instead(name, METRICS, '')}")
        _check_share(min_fidelity)
        return Judge(name, METRICS[name], False, float(min_fidelity))
    if not callable(metric):
        raise TypeError(f"metric must be a name or a function of the output and the exact output, got {metric!r}")
    return Judge(_name_of("metric", metric), metric, False, float(min_fidelity))


def _check_share(min_fidelity: float) -> None:
    if not 0.0 < min_fidelity <= 1.0:
        raise InputError(f"min_fidelity {min_fidelity:g} must be above 0 and at most 1")


def _name_of(kind: str, function: Any) -> str:
    return f"{kind} {getattr(function, '__name__', type(function).__name__)}"


def mean_cosine(output: Any, exact: Any) -> float:
    """Mean cosine along the last axis of the first floating-point tensor; 1 for rows that are 0 in both."""
    mine, reference = _pair(output, exact)
    cosines = torch.nn.functional.cosine_similarity(mine, reference, dim=-1)
    both_zero = (mine == 0).all(-1) & (reference == 0).all(-1)
    return float(cosines.masked_fill(both_zero, 1.0).mean())


def one_minus_relative_error(output: Any, exact: Any) -> float:
    """1 − ‖out − exact‖ / ‖exact‖ over all entries of the first floating-point tensor."""
    return 1.0 - relative_error(*_pair(output, exact))


def relative_error_of(output: Any, exact: Any) -> float | None:
    """‖out − exact‖ / ‖exact‖, as in `one_minus_relative_error`; None if the outputs have no tensors of one shape."""
    try:
        return relative_error(*_pair(output, exact))
    except InputError:
        return None


def exp_of_kl(output: Any, exact: Any) -> float:
    """e^{−KL}, with the mean KL(exact ‖ this) in nats of the softmax along the last axis of the logits."""
    mine, reference = (logits.log_softmax(-1) for logits in _pair(output, exact, prefer="logits"))
    terms = (reference.exp() * (reference - mine)).masked_fill(reference == -math.inf, 0.0)
    return math.exp(-float(terms.sum(-1).mean()))


METRICS: dict[str, Metric] = {
    "cosine": mean_cosine,
    "relative-error": one_minus_relative_error,
    "kl": exp_of_kl,
}


def _pair(output: Any, exact: Any, prefer: str = "") -> tuple[Tensor, Tensor]:
    """The tensors of both outputs, in fp64."""
    mine, reference = (first_tensor(each, prefer) for each in (output, exact))
    if mine.shape != reference.shape:
        raise InputError(f"the output is {tuple(mine.shape)}, but the exact output is {tuple(reference.shape)}")
    return mine.double(), reference.to(mine.device).double()


def first_tensor(output: Any, prefer: str = "") -> Tensor:
    """The first floating-point tensor with an axis in an output, or the one by the name `prefer` if there is one.

    Raises:
        InputError: there is none.
    """
    if prefer and isinstance(output, Mapping) and isinstance(output.get(prefer), Tensor):
        return _padded(output[prefer])
    for tensor in _tensors(output):
        if tensor.is_floating_point() and tensor.ndim > 0:
            return _padded(tensor)
    raise InputError(
        f"the output is a {type(output).__name__} without a floating-point tensor that has an axis; give a metric of "
        "your own, metric=function of the output and the exact output"
    )


def _padded(tensor: Tensor) -> Tensor:
    return tensor.to_padded_tensor(0.0) if tensor.is_nested else tensor


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for member in dataclasses.fields(output):
            yield from _tensors(getattr(output, member.name))
