"""Up to which length a method's settings make it exact attention."""

import math

import torch

from subquad.methods import Full, Method
from subquad.methods.core.halves import ByHalves


def exact_up_to(method: Method, causal: bool, dtype: torch.dtype) -> float:
    """The most tokens on which the settings make this method the baseline's attention; 0: never, infinite: always."""
    if method.is_exact:  # by another kernel
        return math.inf if method == Full() else 0.0
    if causal and isinstance(method, ByHalves):  # one block on the diagonal
        return float(max(method.sized_for(dtype).block, method.last))
    limits = method.traits.exact_limit
    if isinstance(limits, str):
        return 0.0
    settings = {name: getattr(method, name) for name in limits}
    if any(settings[name] != limit for name, limit in limits.items() if not isinstance(limit, str)):
        return 0.0
    return float(min((settings[name] for name, limit in limits.items() if isinstance(limit, str)), default=math.inf))
