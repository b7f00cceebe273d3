"""Figures as text. Every figure may be absent, None or not finite; all three read as "–"."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from subquad.tools.measure.noise import Interval

Tone = Literal["", "faster", "slower", "low", "tie", "missing"]
MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """A figure as text, and how to read it: "low" = below the minimum fidelity, "tie" = within the noise."""

    text: str
    tone: Tone = ""
    value: float | None = field(default=None, compare=False)  # the key for sorting a table; None: the text

    @property
    def sort_key(self) -> str | None:
        """The key by which a table is sorted, a number or a text; None where the figure is missing."""
        if self.value is not None:
            return "Infinity" if self.value == math.inf else repr(self.value)
        return None if self.tone == "missing" else self.text


def known(value: Any) -> float | None:
    """The figure, or None where it is missing or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number(value: Any, digits: int = 3) -> Cell:
    """A figure with `digits` decimals."""
    x = known(value)
    return Cell(MISSING, "missing") if x is None else Cell(f"{x:,.{digits}f}", value=x)


def difference(value: Any, interval: Interval | None) -> Cell:
    """A difference to exact attention with its interval, and ≈ where that contains 0."""
    x = known(value)
    if x is None or interval is None:
        return number(x)
    shown, low, high = (number(round(each, 3) + 0.0).text for each in (x, *interval))
    text = f"{shown} [{low}, {high}]"
    return Cell(f"≈{text}", "tie", x) if interval.low <= 0 <= interval.high else Cell(text, value=x)


def share(value: Any, interval: Interval | None = None) -> Cell:
    """A share as a percentage, with its interval."""
    x = known(value)
    if x is None:
        return Cell(MISSING, "missing")
    ends = "" if interval is None else f" [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
    return Cell(f"{100 * x:.1f} %{ends}", value=x)


def decimals(value: Any) -> int:
    """The number of decimals of milliseconds or MiB that makes three significant digits, at most two."""
    x = known(value)
    return 0 if x is None or abs(x) >= 100 else 1 if abs(x) >= 10 else 2


def size(value: Any, digits: int | None = None) -> Cell:
    """Milliseconds or MiB with three significant digits, or in a column with as many decimals as the others."""
    return number(value, decimals(value) if digits is None else digits)


def significant(x: float) -> str:
    """A figure with three significant digits, from 1,000 on with all digits before the point: not 1.65e+03."""
    return f"{x:.3g}" if abs(x) < 999.5 else f"{x:,.0f}"


def speedup(value: Any, verdict: Any = None) -> Cell:
    """1.42×, ↓0.62× where it is slower than exact attention, ≈1.03× where the verdict is that it is in the noise."""
    x = known(value)
    if x is None:
        return Cell(MISSING, "missing")
    digits = 2 if x >= 0.095 else 3
    shown = round(x, digits)
    if verdict == "within the noise":
        return Cell(f"≈{shown:.{digits}f}×", "tie", x)
    if shown < 1:
        return Cell(f"↓{shown:.{digits}f}×", "slower", x)
    return Cell(f"{shown:.2f}×" if shown < 100 else f"{shown:,.0f}×", "faster" if shown > 1 else "", x)


def kept(value: Any, least: float | None) -> Cell:
    """A fidelity with four decimals, marked if it is below the minimum."""
    x = known(value)
    if x is None or least is None or x >= least:
        return number(x, 4)
    return Cell(number(x, 4).text, "low", x)


def two_digits(x: float) -> int:
    """Rounded to two digits: a crossover is not known any better."""
    return int(round(x, 1 - math.floor(math.log10(x)))) if x >= 1 else 1
