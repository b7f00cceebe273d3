"""Checks of arguments that audits and controlled attention share: a ValueError says what an argument may be."""

import math
from numbers import Integral, Real
from typing import TypeGuard


def check_whole(**numbers: object) -> None:
    """Each is a whole number of at least 1."""
    for name, value in numbers.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}, but it must be a whole number of at least 1")


def check_tolerance(tolerance: object) -> None:
    """A relative error: finite and above 0."""
    if not (_is_number(tolerance) and tolerance > 0 and math.isfinite(tolerance)):
        raise ValueError(f"tolerance={tolerance!r}, but it must be a finite number above 0")


def check_share(**settings: object) -> None:
    """Each is strictly between 0 and 1."""
    for name, value in settings.items():
        if not (_is_number(value) and 0 < value < 1):
            raise ValueError(f"{name}={value!r}, but it must be between 0 and 1")


def check_allowed(allowed: object) -> None:
    """A share that may be 0, but not 1."""
    if not (_is_number(allowed) and 0 <= allowed < 1):
        raise ValueError(f"allowed={allowed!r}, but it must be in [0, 1)")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)
