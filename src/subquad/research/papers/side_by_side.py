"""Common parts of experiments on time: calls in turn, and the reasons why those too slow are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from subquad.methods import parse_method
from subquad.methods.full import EXACT
from subquad.tools.bench.calls import DTYPES, NAIVE, Load, hindrance, second_call
from subquad.tools.bench.settings import BACKWARD
from subquad.tools.measure.timing import Effort, Spread, ratios, spread, until_steady

PROBE = 2048  # tokens: calls of more are predicted from one of this length
Timed = Mapping[str, Mapping[str, Any]]  # by name: {"seconds": round by round} or {"reason": why it was not run}


class ComparedCalls(Protocol):
    """Calls on the inputs of one length, as `tools.bench.calls.Calls`."""

    def call_of(self, name: str) -> Callable[[], Any]:
        """The call of this name."""

    def clear(self) -> None:
        """Forget the gradients of the call before."""


def alternating_rounds(
    make: Callable[[int], ComparedCalls], length: int, names: Iterable[str], effort: Effort, limit: float, device: str
) -> dict[str, Any]:
    """Time each call, all of them once a round: `Timed`.

    Args:
        make: the calls of a length.
        limit: seconds; a call that is predicted to take longer is not run.
    """
    calls = make(length)
    able, reasons = {}, {}
    for name in names:
        call = calls.call_of(name)
        reason = _too_long(make, length, name, limit, device) or hindrance(call)
        if reason is None:
            able[name] = call
        else:
            reasons[name] = {"reason": reason}
    seconds = until_steady(able, effort, torch.device(device), calls.clear) if able else {}
    return {name: {"seconds": rounds} for name, rounds in seconds.items()} | reasons


def _too_long(make: Callable[[int], ComparedCalls], length: int, name: str, limit: float, device: str) -> str | None:
    if length <= PROBE:
        return None
    calls = make(PROBE)
    expected = second_call(calls.call_of(name), device, calls.clear) * (length / PROBE) ** growth(name)
    return f"predicted {expected:,.0f} s per call" if expected > limit else None


def growth(name: str) -> int:
    """The power of the length with which a call's time grows: 1 or 2."""
    return 2 if name in (EXACT, NAIVE) or not parse_method(name).traits.subquadratic else 1


def all_rounds(visits: Sequence[Timed], name: str) -> list[float]:
    """Seconds of a call in all rounds of some visits; none where it was not run in one of them."""
    times = [visit.get(name, {}).get("seconds") for visit in visits]
    return [] if None in times else [second for rounds in times for second in rounds or ()]


def speedup(visits: Sequence[Timed], name: str, against: str) -> Spread | None:
    """The speed-ups of `name` over `against`, round by round; None if either was not run."""
    seconds, other = all_rounds(visits, name), all_rounds(visits, against)
    return spread(ratios(seconds, other)) if seconds and other else None


def naive_gib(load: Load) -> float:
    """The GiB of a naive softmax's N×N matrices: two at once in a forward pass, three in a backward pass."""
    matrices = 3 if load.passes == BACKWARD else 2
    size = torch.empty((), dtype=DTYPES[load.dtype]).element_size()
    return matrices * size * load.batch * load.heads * load.length**2 / 2**30


def shown(value: float | None, unit: str = "") -> str:
    """ "4.9×", "151×", "–"."""
    if value is None:
        return "–"
    return f"{value:.1f}{unit}" if value < 10 else f"{value:,.0f}{unit}"


def powers(first: int, last: int) -> tuple[int, ...]:
    """Lengths: the powers of two from 2**first to 2**last."""
    return tuple(2**power for power in range(first, last + 1))
