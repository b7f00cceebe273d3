"""The arguments that `sq.compare` and `sq.plan` have in common: a module, inputs, methods and minutes."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import nn

from subquad.core.errors import InputError
from subquad.methods import Full, Method, resolve
from subquad.tools.measure.deadline import Deadline
from subquad.tools.measure.module_calls import ModuleCall, run_exactly, spread_order
from subquad.tools.modules.attention_sites import AttentionSites

_COMPILED = "_torchdynamo_orig_callable"  # of a function that torch.compile returned
LENGTHS = 4  # with figures of their own; inputs of more lengths are one group


def check_module(module: Any) -> None:
    """TypeError where it is not a module, or is compiled: each method would be compiled while it is timed."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(module).__name__}")
    for name, part in module.named_modules():
        compiled_here = vars(part).get("_compiled_call_impl"), getattr(vars(part).get("forward"), _COMPILED, None)
        if type(part).__name__ == "OptimizedModule" or any(compiled_here):
            where = f"{name!r} in this {type(module).__name__}" if name else f"this {type(part).__name__}"
            raise TypeError(
                f"{where} is compiled, and each method would be compiled again while it is timed: give the module as "
                "it was before torch.compile (compiled._orig_mod), and compile it afterwards"
            )


def check_minutes(minutes: float) -> None:
    """Raise TypeError where it is not a number, InputError where it is not above 0."""
    if isinstance(minutes, bool) or not isinstance(minutes, Real):
        raise TypeError(f"minutes must be a number, got {minutes!r}")
    if not 0 < minutes < math.inf:
        raise InputError(f"minutes {minutes:g} must be above 0 and finite")


def methods_of(methods: str | Method | Sequence[str | Method]) -> list[Method]:
    """The methods that are named, each once, exact attention aside.

    Raises:
        ValueError: an unknown method.
        InputError: none is named.
    """
    named = [methods] if isinstance(methods, str | Method) else list(methods)
    tried = [method for method in dict.fromkeys(map(resolve, named)) if method != Full()]
    if not tried:
        raise InputError("the methods name none but exact attention, so there is nothing to compare it with")
    return tried


def grouped(
    sites: AttentionSites, calls: Sequence[ModuleCall], seconds: float, lengths: int | None = LENGTHS
) -> tuple[dict[int, list[ModuleCall]], bool]:
    """The calls by their number of tokens, and whether all attention is causal.

    Tokens are the queries of the first call of attention. Calls of more than `lengths` lengths are one group, under the
    longest; with None, each length has its own. After these seconds, calls of shapes that were not counted yet are left
    out.

    Raises:
        InputError: a call that the module does not take, or in which no attention is called.
    """
    deadline, tokens, causal = Deadline(seconds), dict[Any, int](), True
    for call in spread_order(list(calls)):
        if call.shapes in tokens or (tokens and deadline.left < 0):
            continue
        tokens[call.shapes], all_causal = _observed(sites, call)
        causal = causal and all_causal
    groups: dict[int, list[ModuleCall]] = {}
    for call in spread_order(list(calls)):
        if call.shapes in tokens:
            groups.setdefault(tokens[call.shapes], []).append(call)
    if lengths is not None and len(groups) > lengths:
        groups = {max(groups): [call for call in spread_order(list(calls)) if call.shapes in tokens]}
    return dict(sorted(groups.items())), causal


def _observed(sites: AttentionSites, call: ModuleCall) -> tuple[int, bool]:
    """The tokens of a call, and whether all of its attention is causal."""
    try:
        with sites.observed() as observed:
            call.run(sites.module)
    except Exception as error:
        run_exactly(call, sites.module)  # raises if the module itself does not take the input
        message = " ".join(str(error).split())
        raise InputError(f"no method can run in this {type(sites.module).__name__}: {message}") from error
    if not observed:
        raise InputError(f"no attention that a method can replace was called for input {call.number}")
    return observed[0].tokens, all(each.is_causal for each in observed)
