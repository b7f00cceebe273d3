"""Signed features, as the difference of two attentions by features that are not negative.

    f = f⁺ − f⁻:   φ(q)·φ(k) = (q⁺·k⁺ + q⁻·k⁻) − (q⁺·k⁻ + q⁻·k⁺)

Each of the two sums has its output and log-sum-exp, exactly stabilised. What is left is one subtraction, whose result
may be near 0 or below: as signed features have such weights. If it is 0, the output is 0.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def parts(features: Float[Tensor, "*batch R"]) -> Float[Tensor, "*batch F"]:
    """The exponents [ln f⁺, ln f⁻]."""
    both = torch.cat([features, -features], dim=-1)
    none = both <= 0  # which NaN is not
    return torch.where(none, -torch.inf, torch.where(none, 1.0, both).log())


def crossed(of_query: Float[Tensor, "*batch F"]) -> Float[Tensor, "*batch F"]:
    """The query's exponents with the parts exchanged, so that they meet the keys' other part."""
    return of_query.roll(of_query.shape[-1] // 2, dims=-1)


def difference(
    equal: tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]],
    crossed: tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]],
) -> Float[Tensor, "B H N E"]:
    """Σ w v / Σ w, where w is the first's weights less the second's."""
    (plus, of_plus), (minus, of_minus) = equal, crossed
    largest = torch.maximum(of_plus, of_minus).detach()
    largest = torch.where(torch.isneginf(largest), 0.0, largest)
    a, b = (of_plus - largest).exp().unsqueeze(-1), (of_minus - largest).exp().unsqueeze(-1)
    total = a - b
    return torch.where(total == 0, 0.0, (a * plus - b * minus) / torch.where(total == 0, 1.0, total))
