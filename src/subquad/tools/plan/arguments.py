"""Checks of what the user gives to `sq.plan`, and marks that tell the inputs and metrics of one run from others."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from subquad.core.errors import InputError
from subquad.methods import BoundMethod, Method
from subquad.methods.core.mixture import common_seed, is_mixture
from subquad.tools.measure.metrics import Judge, Metric, Score, judge_of
from subquad.tools.plan.measure import Candidate
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.runs.floor import check_floor

LEAST_MINUTES = 0.1


def settings_from(
    min_fidelity: float,
    minutes: float,
    shift: float = PlanSettings.shift,
    lengths: Any = None,
    seed: int = PlanSettings.seed,
) -> PlanSettings:
    """The settings of a plan; without lengths, the user names none.

    Raises:
        TypeError: one of them is not a number, or the lengths are not several.
    """
    for name, value in (("min_fidelity", min_fidelity), ("shift", shift), ("minutes", minutes)):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} must be a number, got {value!r}")
    if isinstance(lengths, str) or not (lengths is None or isinstance(lengths, Iterable)):
        raise TypeError(f"lengths must be a sequence of whole numbers, such as [512, 2048], got {lengths!r}")
    lengths = None if lengths is None else list(lengths)
    for length in lengths or ():
        if isinstance(length, bool) or not isinstance(length, Integral):
            raise TypeError(f"lengths must be whole numbers, got {length!r}")
    named = None if lengths is None else tuple(map(int, lengths))
    return PlanSettings(min_fidelity=min_fidelity, shift=shift, lengths=named, minutes=minutes, seed=seed)


def check_settings(settings: PlanSettings) -> None:
    """InputError where a setting is out of its range."""
    check_floor(settings)
    if not 1.0 <= settings.shift < math.inf:
        raise InputError(f"shift {settings.shift:g} must be at least 1 and finite")
    if not LEAST_MINUTES <= settings.minutes < math.inf:
        raise InputError(f"minutes {settings.minutes:g} must be at least {LEAST_MINUTES:g} and finite")
    if not settings.model_lengths and not settings.is_from_text:
        raise InputError("no lengths to plan for: --lengths names none")
    wrong = [length for length in settings.model_lengths if length < 16]
    if wrong:
        raise InputError(f"a length of {wrong[0]} is too short to plan for; the shortest is 16 tokens")


def as_inputs(inputs: Any) -> list[Any]:
    """The inputs in a list. TypeError where they are a single one, or nothing that holds several."""
    if isinstance(inputs, str | Mapping | Tensor) or not isinstance(inputs, Iterable):
        raise TypeError(f"inputs are a list of mappings or of texts, got one {type(inputs).__name__}")
    return list(inputs)


def judge_for(inputs: Sequence[Any], metric: str | Metric | None, score: Score | None, floor: float) -> Judge | None:
    """The judge of a metric or a score; None without one.

    Raises:
        InputError: both are given, no metric has that name, or the inputs are texts.
        TypeError: a metric or a score that is not a function.
    """
    if metric is None and score is None:
        return None
    if inputs and all(isinstance(item, str) for item in inputs):
        raise InputError(
            f"{'score' if metric is None else 'metric'} judges what the model returns for an input, but texts are "
            "planned by the cosine of their embeddings; give mappings of the model's keywords to tensors"
        )
    return judge_of(metric, score, floor)


def check_unlearned(methods: Sequence[Method]) -> None:
    """InputError where a method has learned parameters, which `sq.plan` does not fit."""
    for method in methods:
        if method.traits.learned:
            raise InputError(
                f"{method} has learned parameters, and sq.plan tries methods that need no fitting; leave it out of "
                "methods"
            )


def check_together(at: Mapping[int, Sequence[Candidate]]) -> None:
    """InputError where the candidates of all lengths could not be joined to one `by-length` in a layer."""
    methods = [
        m.method if isinstance(m, BoundMethod) else m
        for candidates in at.values()
        for c in candidates
        for m in c.by_layer.values()
    ]
    for method in methods:
        if is_mixture(method):
            raise InputError(
                f"{method} is a mixture, but a plan joins its methods by length and accepts only single ones"
            )
    try:
        common_seed(methods if len(at) > 1 else [])
    except ValueError as error:
        raise InputError(f"the methods of several lengths run in one layer, where {error}") from None


def mark_of_inputs(inputs: Sequence[Mapping[str, Any]]) -> str:
    """A mark of the inputs in 16 hexadecimal digits: their names, and all that is in their tensors."""
    digest = sha256()
    for item in inputs:
        for name, value in sorted(item.items()):
            if isinstance(value, Tensor):
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(_raw_bytes(value))
            else:
                digest.update(f"{name} {value!r}".encode())
    return digest.hexdigest()[:16]


def _raw_bytes(tensor: Tensor) -> bytes:
    """The values of a tensor of any dtype, in row-major order.

    They are copied into a new tensor: `contiguous` returns a tensor of one element as it is, whatever its stride, and
    torch views the bytes of no other stride than 1, nor those of a conjugate.
    """
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype)
    packed.copy_(tensor.detach().reshape(-1))
    return packed.view(torch.uint8).numpy().tobytes()


def mark_of_function(function: str | Callable[..., Any] | None) -> str | None:
    """A mark of a function: its name, code, numbers and texts; not what it reads from elsewhere."""
    if function is None or isinstance(function, str):
        return function
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    constants = [each for each in code.co_consts if isinstance(each, int | float | str | None)]
    return sha256(repr((name, code.co_code, code.co_names, constants)).encode()).hexdigest()[:16]
