"""Checks of what the user gives to `sq.plan`, and marks that tell the inputs and metrics of one run from others."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from numbers import Integral, Real
from types import CodeType
from typing import Any

import numpy as np
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
    """A mark of the inputs in 16 hexadecimal digits: their names, and all that is in their tensors, nested ones too."""
    digest = sha256()
    for item in inputs:
        for name, value in sorted(item.items()):
            for part in _parts(name, value):
                digest.update(part)
    return digest.hexdigest()[:16]


def _parts(name: str, value: Any) -> Iterator[bytes]:
    """The name of a value and all that is in it; texts of long tensors and arrays leave most of them out."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        yield f"{name} {value.dtype} {tuple(value.shape)}".encode()
        yield _raw_bytes(value)
    elif isinstance(value, Mapping | list | tuple):
        yield f"{name} {type(value).__name__} {len(value)}".encode()
        pairs = sorted(value.items(), key=str) if isinstance(value, Mapping) else enumerate(value)
        for key, each in pairs:
            yield from _parts(f"{name} {key!r}", each)
    else:
        yield f"{name} {value!r}".encode()


def _raw_bytes(tensor: Tensor) -> bytes:
    """The values of a tensor of any dtype, in row-major order.

    They are copied into a new tensor: `contiguous` returns a tensor of one element as it is, whatever its stride, and
    torch views the bytes of no other stride than 1, nor those of a conjugate.
    """
    packed = torch.empty(tensor.numel(), dtype=tensor.dtype)
    packed.copy_(tensor.detach().reshape(-1))
    return packed.view(torch.uint8).numpy().tobytes()


def mark_of_function(function: str | Callable[..., Any] | None) -> str | None:
    """A mark of a function: its name, its code with the functions inside it, constants and defaults that are plain.

    Not what it reads from elsewhere.
    """
    if function is None or isinstance(function, str):
        return function
    name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    code = getattr(function, "__code__", None)
    if code is None:
        return name
    defaults = [_plain(each) for each in (function.__defaults__, function.__kwdefaults__)]
    return sha256(repr((name, _plain(code), defaults)).encode()).hexdigest()[:16]


def _plain(constant: Any) -> Any:
    """A constant whose text is the same in another process: of other objects, their type."""
    if isinstance(constant, CodeType):
        return constant.co_code, constant.co_names, [_plain(each) for each in constant.co_consts]
    if isinstance(constant, tuple | list):
        return [_plain(each) for each in constant]
    if isinstance(constant, dict):
        return [(name, _plain(each)) for name, each in constant.items()]
    if isinstance(constant, set | frozenset):
        return sorted(repr(_plain(each)) for each in constant)
    return constant if isinstance(constant, int | float | complex | str | bytes | None) else type(constant).__qualname__
