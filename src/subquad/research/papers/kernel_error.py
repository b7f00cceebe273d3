"""The relative error of random features that estimate e^{x·y}, measured and from the exact formulas.

x and y are random directions of one norm. The error is relative, √(mean (estimate/e^{x·y} − 1)²) over pairs and draws.
For independent rows it is the root of the mean over pairs of (z = x + y, Δ = x − y, R rows, D their width)

    positive       (e^{‖z‖²} − 1) / R                                              Choromanski et al. 2021, lemma 2
    hyperbolic     ½ (e^{‖z‖²} − 1)(1 − e^{−‖z‖²}) / R                              the same
    trigonometric  ½ e^{‖Δ‖²} (1 − e^{−‖Δ‖²})² / R                                  the same
    favor++        ((1 − 4A)^D / (1 − 8A)^{D/2} e^{2(1 − 4A)/(1 − 8A)‖z‖² − ‖z‖²} − 1) / R    Likhosherstov et al. 2022

Large errors of positive estimates come from rare draws: above a norm of 1 or so a mean over some draws lies below the
formula. ReLU features estimate another kernel and are not here.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.core.randomness import directions
from subquad.kernels.attention.feature_maps import EXPONENTIAL, exponential_map, optimal_a, trigonometric_features

KINDS = (*EXPONENTIAL, "trigonometric")


def pairs(norm: float, width: int, count: int, seed: int = 0) -> tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]:
    """x and y of this norm in random directions, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, count, width, generator=generator, dtype=torch.float64)
    x, y = norm * drawn / drawn.norm(dim=-1, keepdim=True)
    return x, y


def per_row(kind: str) -> int:
    """Features that a row makes."""
    return 2 if kind in ("hyperbolic", "trigonometric") else 1


def estimates(
    kind: str, x: Float[Tensor, "n D"], y: Float[Tensor, "n D"], rows: int, seed: int, independent: bool
) -> Float[Tensor, "n"]:
    """φ(x)·φ(y) of each pair, divided by e^{x·y}; "favor++" with A for the mean of ‖x + y‖²."""
    drawn = directions(seed, None, rows, x.shape[1], independent, like=x)
    if kind == "trigonometric":
        product = (trigonometric_features(x, drawn) * trigonometric_features(y, drawn)).sum(-1)
        return product * ((x - y).square().sum(-1) / 2).exp()
    made = exponential_map(kind, drawn, float((x + y).square().sum(-1).mean()))
    return (made.exponents(x) + made.exponents(y) - (x * y).sum(-1, keepdim=True)).exp().sum(-1)


def measured(
    kind: str, x: Float[Tensor, "n D"], y: Float[Tensor, "n D"], features: int, draws: int, independent: bool
) -> float:
    """The relative error over pairs and draws, with `features` features."""
    rows = features // per_row(kind)
    squares = [(estimates(kind, x, y, rows, seed, independent) - 1).square().mean() for seed in range(draws)]
    return float(torch.stack(squares).mean().sqrt())


def expected(kind: str, x: Float[Tensor, "n D"], y: Float[Tensor, "n D"], features: int) -> float:
    """The expected relative error for independent rows, from the variance of one row."""
    s, rows = (x + y).square().sum(-1), features / per_row(kind)
    positive = s.exp() - 1
    if kind == "positive":
        variance = positive
    elif kind == "hyperbolic":
        variance = positive * (1 - (-s).exp()) / 2
    elif kind == "trigonometric":
        apart = (x - y).square().sum(-1)
        variance = apart.exp() * (1 - (-apart).exp()).square() / 2
    else:
        width, a = x.shape[1], optimal_a(float(s.mean()), x.shape[1])
        growth = 2 * (1 - 4 * a) / (1 - 8 * a) - 1
        variance = ((1 - 4 * a) ** width / (1 - 8 * a) ** (width / 2)) * (growth * s).exp() - 1
    return math.sqrt(float(variance.mean()) / rows)
