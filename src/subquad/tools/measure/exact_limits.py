"""Up to which length a method's settings make it exact attention."""

import math

from subquad.methods import Full, Method


def exact_up_to(method: Method, causal: bool = False) -> float:
    """The most tokens on which the settings make this method the baseline's attention; 0: never, infinite: always."""
    if method.is_exact:  # by another kernel
        return math.inf if method == Full() else 0.0
    if causal and method.traits.by_halves:  # one block on the diagonal
        return float(max(getattr(method, "block", 0), getattr(method, "last", 0)))
    limits = method.traits.exact_limit
    if isinstance(limits, str):
        return 0.0
    settings = {name: getattr(method, name) for name in limits}
    if any(settings[name] != limit for name, limit in limits.items() if not isinstance(limit, str)):
        return 0.0
    return float(min((settings[name] for name, limit in limits.items() if isinstance(limit, str)), default=math.inf))
