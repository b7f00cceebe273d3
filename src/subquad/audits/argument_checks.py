"""Checks of arguments that audits and controlled attention share: a ValueError states what an argument may be."""

import math
from numbers import Real
from typing import TypeGuard

from subquad.core.spelling import listed
from subquad.core.whole_numbers import is_whole


def check_whole(**numbers: object) -> None:
    """Each is a whole number of at least 1."""
    for name, value in numbers.items():
        if not is_whole(value, 1):
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


def check_floor(max_kl: object, min_agreement: object, min_fidelity: object = None) -> None:
    """At most one of them: a KL above 0 in nats, or a share or a cosine above 0."""
    floors = {"max_kl": max_kl, "min_agreement": min_agreement, "min_fidelity": min_fidelity}
    named = [f"{name}={value!r}" for name, value in floors.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{listed(named)} are {'both' if len(named) == 2 else 'all'} given; give one of them")
    if max_kl is not None and not (_is_number(max_kl) and 0 < max_kl < math.inf):
        raise ValueError(f"max_kl={max_kl!r}, but it must be a finite number of nats above 0")
    for name in ("min_agreement", "min_fidelity"):
        value = floors[name]
        if value is not None and not (_is_number(value) and 0 < value <= 1):
            raise ValueError(f"{name}={value!r}, but it must be above 0 and at most 1")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)
