"""Whole numbers among the arguments of public functions."""

from numbers import Integral
from typing import TypeGuard


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """True for a whole number of at least `least`: an int or one of NumPy's, but no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
