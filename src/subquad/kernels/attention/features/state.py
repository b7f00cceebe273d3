"""The state of attention by features: what keys and values leave behind, and how queries read it.

Features are exp(y_jr), given by their exponents y. With c_r = max_j y_jr over the keys so far,

    S_r = Σ_j e^{y_jr − c_r} v_j,   z_r = Σ_j e^{y_jr − c_r},   out_i = Σ_r e^{x_ir + c_r} S_r / Σ_r e^{x_ir + c_r} z_r.

The factors e^{−c_r} come back in the query's exponents, which are taken less their own maximum. So the denominator is
at least 1 and nothing is added to it: the result is the sum itself, to rounding.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

SHRUNK = 24  # sums are 2^−24 of what they are: 2²⁴ keys of the largest values have finite ones


class FeatureState(NamedTuple):
    """Sums over keys, times 2^−SHRUNK, so that no sum of values overflows whose mean does not.

    `largest` is −inf, and the sums are 0, for a feature that no key has.
    """

    sums: Float[Tensor, "*batch R E"]
    totals: Float[Tensor, "*batch R"]
    largest: Float[Tensor, "*batch R"]


def state_of(of_key: Float[Tensor, "*batch M R"], value: Float[Tensor, "*batch M E"]) -> FeatureState:
    """S, z and c of these keys; an exponent of −inf takes a feature from a key."""
    # A constant: what it multiplies is divided by it again.
    largest = of_key.detach().amax(-2)
    features = (of_key - _or_zero(largest).unsqueeze(-2)).exp() * 2.0**-SHRUNK
    return FeatureState(features.mT @ value, features.sum(-2), largest)


def merge(first: FeatureState, second: FeatureState) -> FeatureState:
    """The state of both sets of keys."""
    largest = torch.maximum(first.largest, second.largest)
    a, b = ((state.largest - _or_zero(largest)).exp() for state in (first, second))
    sums = a[..., None] * first.sums + b[..., None] * second.sums
    return FeatureState(sums, a * first.totals + b * second.totals, largest)


def read(
    state: FeatureState, of_query: Float[Tensor, "*batch N R"]
) -> tuple[Float[Tensor, "*batch N E"], Float[Tensor, "*batch N"]]:
    """Read a state for queries: out, and ln of the sum of its weights. 0 and −inf where there is no key."""
    exponents = of_query + state.largest.unsqueeze(-2)
    largest = _or_zero(exponents.detach().amax(-1, keepdim=True))
    features = (exponents - largest).exp()
    total = (features @ state.totals.unsqueeze(-1)).squeeze(-1)
    present = total != 0  # NaN is there
    total = torch.where(present, total, 1.0)
    lse = torch.where(present, (total * 2.0**SHRUNK).log() + largest.squeeze(-1), -torch.inf)
    return features @ state.sums / total.unsqueeze(-1), lse


def _or_zero(largest: Tensor) -> Tensor:
    return torch.where(torch.isneginf(largest), 0.0, largest)
