"""Random features of the softmax kernel, φ with E[φ(x)·φ(y)] = e^{x·y}, as what is needed to compute with them.

    positive       φ(x) = e^{w·x − ‖x‖²/2} / √R                                 Choromanski et al. 2021, lemma 1
    hyperbolic     φ(x) = [e^{w·x}, e^{−w·x}] e^{−‖x‖²/2} / √(2R)               the same
    favor++        φ(x) = (1 − 4A)^{D/4} e^{A‖w‖² + √(1 − 4A) w·x − ‖x‖²/2} / √R   Likhosherstov et al. 2022, section 3
    trigonometric  φ(x) = [sin w·x, cos w·x] e^{‖x‖²/2} / √R                    Rahimi and Recht 2007
    relu           φ(x) = (max(0, w·x) + 10⁻³) / √R      no estimate of e^{x·y}: Choromanski et al. 2021, section 4

The rows w are standard normal (`randomness.directions`). Exponents are ln φ, so that features of any size can be had.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

EXPONENTIAL = ("positive", "hyperbolic", "favor++")  # their exponents are linear in x, less ‖x‖²/2
KINDS = (*EXPONENTIAL, "trigonometric", "relu")
FLOOR = 1e-3  # of the ReLU features


class ExponentialMap(NamedTuple):
    """ln φ_r(x) = u_r·x + b_r − ‖x‖²/2."""

    rows: Float[Tensor, "R D"]
    bias: Float[Tensor, "R"]

    def exponents(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch R"]:
        """ln φ(x)."""
        return x @ self.rows.mT + self.bias - x.square().sum(-1, keepdim=True) / 2


def exponential_map(kind: str, drawn: Float[Tensor, "R D"], norm: float) -> ExponentialMap:
    """The map of one of the kinds in `EXPONENTIAL`. `norm`: E‖x + y‖², where the variance of "favor++" is smallest."""
    features, width = drawn.shape
    rows, bias = drawn, drawn.new_zeros(features)
    if kind == "hyperbolic":
        rows, bias = torch.cat([drawn, -drawn]), drawn.new_zeros(2 * features)
    if kind == "favor++":
        a = optimal_a(norm, width)
        rows = (1 - 4 * a) ** 0.5 * drawn
        bias = a * drawn.square().sum(-1) + width / 4 * math.log(1 - 4 * a)
    return ExponentialMap(rows, bias - 0.5 * math.log(len(rows)))


def optimal_a(norm: float, width: int) -> float:
    """A ≤ 0 of the smallest variance where ‖x + y‖² is `norm`: Likhosherstov et al. 2022, theorem 3.3.

        A = (1 − 1/ρ)/8,   ρ = (√((2s + D)² + 8Ds) − 2s − D) / (4s),   s = ‖x + y‖²

    >>> optimal_a(0.0, 64)
    0.0
    >>> round(optimal_a(16.0, 64), 4)
    -0.0976
    """
    if norm == 0:
        return 0.0
    s, d = norm, width
    rho = (((2 * s + d) ** 2 + 8 * d * s) ** 0.5 - 2 * s - d) / (4 * s)
    return (1 - 1 / rho) / 8


def relu_exponents(x: Float[Tensor, "*batch D"], drawn: Float[Tensor, "R D"]) -> Float[Tensor, "*batch R"]:
    """ln φ of the ReLU features."""
    return ((x @ drawn.mT).relu() + FLOOR).log() - 0.5 * math.log(len(drawn))


def trigonometric_features(x: Float[Tensor, "*batch D"], drawn: Float[Tensor, "R D"]) -> Float[Tensor, "*batch F"]:
    """[sin w·x, cos w·x]/√R: φ without its factor e^{‖x‖²/2}."""
    angles = x @ drawn.mT
    return torch.cat([angles.sin(), angles.cos()], dim=-1) * len(drawn) ** -0.5
