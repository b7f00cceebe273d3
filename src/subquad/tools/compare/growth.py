"""Growth of times with the length: where a method overtakes exact attention, and what a longer input would gain.

A time t at n tokens is taken to be a·n + b·nᵖ with a, b ≥ 0: what each token costs by itself, and its attention, with
p = 2 for exact attention and p = 3/2 for sub-quadratic methods: attention by halves, whose clusters and top keys grow
like n^¾, took 2^1.5 times as long when the length doubled to 8,192 tokens, and 2^1.44 times when it doubled to 16,384
(`clustered-tail` in bf16), because the number of its blocks grows like n. Two neighbouring measured lengths determine a
and b between them, so that the curve is exact at all of them; beyond the longest, those of the last two predict.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import numpy as np

from subquad.methods import Method, from_dict
from subquad.tools.compare.recommend import is_exact_kernel, is_faithful, is_full
from subquad.tools.compare.schema import MethodReport
from subquad.tools.measure.exact_limits import exact_up_to
from subquad.tools.models.dtypes import FP32, TORCH
from subquad.tools.runs.floor import Floor

Curve = Callable[[float], float]  # from tokens to milliseconds
QUADRATIC, SUBQUADRATIC = 2.0, 1.5
FARTHEST = 16  # times the longest length, up to which a crossing is looked for


def exponent(method: Method) -> float:
    """The power of the length by which a method's attention grows.

    >>> import subquad as sq
    >>> exponent(sq.ClusteredTail()), exponent(sq.Full())
    (1.5, 2.0)
    """
    return SUBQUADRATIC if method.traits.subquadratic else QUADRATIC


def curve(times: Mapping[int, float], power: float) -> Curve:
    """The curve through all times: a·n + b·nᵖ between two lengths, and beyond the longest that of the last two.

    >>> exact = curve({500: 2.0, 1000: 3.0, 2000: 8.0}, power=2.0)
    >>> round(exact(500), 6), round(exact(4000), 6)
    (2.0, 24.0)
    """
    lengths = sorted(times)
    n, m = lengths[-2:]
    rates = [times[length] / length for length in lengths]  # of a token: a + b·nᵖ⁻¹, a line in nᵖ⁻¹
    b = (rates[-1] - rates[-2]) / (m ** (power - 1) - n ** (power - 1))
    b = min(max(b, 0.0), rates[-1] / m ** (power - 1))
    a = rates[-1] - b * m ** (power - 1)
    grown = [length ** (power - 1) for length in lengths]
    return lambda tokens: (
        tokens
        * (a + b * tokens ** (power - 1) if tokens > m else float(np.interp(tokens ** (power - 1), grown, rates)))
    )


def crossing(slow: Curve, fast: Curve, shortest: int, longest: int) -> float | None:
    """The length between two from which on `fast` takes less time than `slow`; None if it takes more at the longest.

    >>> round(crossing(lambda n: n * n, lambda n: 100 * n, 1, 1000))
    100
    """
    if fast(longest) >= slow(longest):
        return None
    if fast(shortest) <= slow(shortest):
        return float(shortest)
    low, high = float(shortest), float(longest)
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fast(middle) < slow(middle) else (middle, high)
    return high


def curve_of(
    method: MethodReport, lengths: Sequence[int] | None = None, factors: Mapping[int, float] | None = None
) -> Curve | None:
    """The curve of a row's forward passes of a whole model; None if it was measured at fewer than two lengths.

    Args:
        method: the row.
        lengths: those that count, by default all that were measured.
        factors: what multiplies the time at a length, by default 1.
    """
    measured = {int(n): cost.ms for n, cost in (method.model or {}).items()}
    times = {n: ms * (factors or {}).get(n, 1.0) for n, ms in measured.items() if lengths is None or n in lengths}
    return curve(times, exponent(from_dict(method.settings))) if len(times) > 1 else None


def fastest_exact(methods: Sequence[MethodReport], dtype: str, length: int) -> MethodReport | None:
    """The fastest row of exact attention in a dtype at a length, by whatever kernel."""
    rows = [m for m in methods if is_exact_kernel(m) and (m.dtype or FP32) == dtype and str(length) in (m.model or {})]
    return min(rows, key=lambda m: m.cost("model", length).ms, default=None)


def closest_approximation(methods: Sequence[MethodReport], length: int, floor: Floor) -> MethodReport | None:
    """The fastest row at a length that keeps the floor and is not exact attention."""
    able = [m for m in methods if m.status == "measured" and not is_exact_kernel(m) and str(length) in (m.model or {})]
    able = [m for m in able if is_faithful(m, str(length), floor)]
    return min(able, key=lambda m: m.cost("model", length).ms, default=None)


def growth_note(
    methods: Sequence[MethodReport], lengths: Sequence[int], floor: Floor, noise: Mapping[int, float] | None = None
) -> str:
    """From which length on an approximation is the fastest, and what twice the longest length is predicted to gain.

    `noise`: the factors of `RunNoise.model`, by length. Empty if no approximation keeps the floor at the longest
    length, if that one is exact attention there by its settings, or if there is one length only.
    """
    if len(set(lengths)) < 2:
        return ""
    longest = max(lengths)
    chosen = closest_approximation(methods, longest, floor)
    if chosen is None:
        return ""
    dtype = chosen.dtype or FP32
    exact = fastest_exact(methods, dtype, longest)
    baseline = next((m for m in methods if is_full(m) and (m.dtype or FP32) == dtype), None)
    curves = [None if m is None else curve_of(m, lengths) for m in (chosen, exact, baseline)]
    fast, slow, usual = curves
    if fast is None or slow is None or usual is None or exact is None:
        return ""
    start = overtaking(chosen, exact, lengths, floor.of_next_tokens)
    if start is not None:
        source = "interpolated" if start <= longest else "predicted"
        where = f"{chosen.method} overtakes {exact.method}, the fastest exact attention, at about {_rounded(start):,} "
        where += f"tokens ({source}{_uncertainty(chosen, slow, lengths, start, floor.of_next_tokens, noise or {})})"
    else:
        where = _from_where(chosen, exact, lengths, floor.of_next_tokens)
        if not where:
            return ""
    twice = 2 * longest
    return (
        f"{where}; at {twice:,} tokens it is predicted to run {usual(twice) / fast(twice):.1f}× as fast as exact "
        f"attention in {dtype}."
    )


def overtaking(chosen: MethodReport, exact: MethodReport, lengths: Sequence[int], causal: bool) -> float | None:
    """The length from which on a row is faster than exact attention, where their curves cross.

    `causal`: the model is a causal language model. None if the row is exact attention at the crossing by its settings,
    or if it was faster at every length measured.
    """
    slow, fast, longest = curve_of(exact, lengths), curve_of(chosen, lengths), max(lengths)
    measured, most = _measured(chosen, exact, lengths), _exact_up_to(chosen, causal)
    # A row may be faster at shorter lengths, where it is exact itself.
    last = max((n for n in measured if chosen.cost("model", n).ms >= exact.cost("model", n).ms), default=0)
    if slow is None or fast is None or last == 0 or most >= longest:
        return None
    after = min((n for n in measured if n > last), default=FARTHEST * longest)
    start = crossing(slow, fast, last, after)
    return start if start is not None and max(last, most) < start else None


def _uncertainty(
    chosen: MethodReport,
    slow: Curve,
    lengths: Sequence[int],
    crossed: float,
    causal: bool,
    noise: Mapping[int, float],
) -> str:
    """The range of lengths at which a row may overtake exact attention; empty if it is a single length.

    Each of the two times that determine the row's curve where it crosses is multiplied or divided by the noise; those
    of exact attention stay.
    """
    measured = sorted(n for n in set(lengths) if str(n) in (chosen.model or {}))
    start = int(max(measured[0], _exact_up_to(chosen, causal)))
    index = next((i for i, n in enumerate(measured) if n >= crossed), len(measured) - 1)
    around = measured[max(index, 1) - 1 :][:2]
    ends: set[float] = set()
    for factors in product(*((1 / noise.get(n, 1.0), noise.get(n, 1.0)) for n in around)):
        fast = curve_of(chosen, measured, dict(zip(around, factors, strict=True)))
        assert fast is not None, "a row with an overtaking has a curve"
        at = crossing(slow, fast, start, FARTHEST * max(lengths))
        ends.add(math.inf if at is None else _rounded(at))
    if len(ends) == 1:
        return ""
    first = f"≤{start:,}" if min(ends) == _rounded(float(start)) else f"{min(ends):,}"
    return f"; with the noise of this run, {first} {'or later, or never' if math.inf in ends else f'to {max(ends):,}'}"


def _measured(chosen: MethodReport, exact: MethodReport, lengths: Sequence[int]) -> list[int]:
    """The lengths at which both rows were measured, the shortest first."""
    return sorted(n for n in lengths if str(n) in (chosen.model or {}) and str(n) in (exact.model or {}))


def _exact_up_to(row: MethodReport, causal: bool) -> float:
    """The most tokens on which a row is exact attention by its settings; 0 for a plan, whose layers have them each."""
    return 0.0 if row.plan is not None else exact_up_to(from_dict(row.settings), causal, TORCH[row.dtype or FP32])


def _from_where(chosen: MethodReport, exact: MethodReport, lengths: Sequence[int], causal: bool) -> str:
    """From which length on a row was faster than exact attention wherever measured; empty if not at the longest."""
    measured, most = _measured(chosen, exact, lengths), _exact_up_to(chosen, causal)
    costs = {n: chosen.cost("model", n) for n in measured}
    ties = [n for n in measured if costs[n].verdict == "within the noise"]
    last = max((n for n in measured if n in ties or costs[n].ms >= exact.cost("model", n).ms), default=0)
    if max(last, most) >= measured[-1]:
        return ""
    if max(last, measured[0]) <= most:
        return (
            f"{chosen.method} is exact attention up to {most:,.0f} tokens, and beyond them it is faster than "
            f"{exact.method}, the fastest exact attention"
        )
    faster = f"faster than {exact.method}, the fastest exact attention"
    if last == 0:
        return f"{chosen.method} is {faster}, at every length measured"
    where = f"{chosen.method} is {faster}, from {next(n for n in measured if n > last):,} tokens on"
    return f"{where} (at {last:,}, the difference is within the noise)" if last in ties else where


def _rounded(tokens: float) -> int:
    """A number of tokens with two digits."""
    step = 10 ** max(math.floor(math.log10(tokens)) - 1, 0)
    return round(tokens / step) * step
