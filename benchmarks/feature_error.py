"""How well random features estimate e^{x·y}: error against their number and the norm, beside the exact formulas.

    python benchmarks/feature_error.py [--out FILE.md] [--figure FILE.png]

x and y are random directions of one norm at D = 64; features are those of `subquad.ops.feature_maps`. The error is
relative, √(mean (estimate/e^{x·y} − 1)²) over pairs and draws. Lines are the exact errors of independent rows, the
roots of the means of (z = x + y, Δ = x − y, R rows)

    positive       (e^{‖z‖²} − 1) / R
    hyperbolic     ½ (e^{‖z‖²} − 1)(1 − e^{−‖z‖²}) / R
    trigonometric  ½ e^{‖Δ‖²} (1 − e^{−‖Δ‖²})² / R
    favor++        ((1 − 4A)^D / (1 − 8A)^{D/2} e^{2(1 − 4A)/(1 − 8A)‖z‖² − ‖z‖²} − 1) / R

Large errors of positive estimates come from rare draws: above a norm of 1 or so a mean over some draws lies below the
formula. ReLU features estimate another kernel and are not here.
"""

import math
from pathlib import Path

import sheet
import torch
from matplotlib.figure import Figure
from torch import Tensor

from subquad.ops.feature_maps import EXPONENTIAL, exponential_map, optimal_a, trigonometric_features
from subquad.randomness import directions
from subquad.report import drawing

KINDS = (*EXPONENTIAL, "trigonometric")
COLORS = dict(zip(KINDS, ("#0072B2", "#009E73", "#D55E00", "#7A5195"), strict=True))
WIDTH, PAIRS = 64, 64


def pairs(norm: float, count: int = PAIRS) -> tuple[Tensor, Tensor]:
    """x and y of this norm in random directions, (count, D) each, in fp64."""
    drawn = torch.randn(2, count, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return tuple(norm * drawn / drawn.norm(dim=-1, keepdim=True))


def per_row(kind: str) -> int:
    """Features that a row makes."""
    return 2 if kind in ("hyperbolic", "trigonometric") else 1


def estimates(kind: str, x: Tensor, y: Tensor, rows: int, seed: int, independent: bool) -> Tensor:
    """φ(x)·φ(y) of each pair, divided by e^{x·y}."""
    drawn = directions(seed, None, rows, WIDTH, independent, like=x)
    if kind == "trigonometric":
        product = (trigonometric_features(x, drawn) * trigonometric_features(y, drawn)).sum(-1)
        return product * ((x - y).square().sum(-1) / 2).exp()
    made = exponential_map(kind, drawn, float((x + y).square().sum(-1).mean()))
    return (made.exponents(x) + made.exponents(y) - (x * y).sum(-1, keepdim=True)).exp().sum(-1)


def measured(norm: float, features: int, draws: int, independent: bool) -> dict[str, float]:
    """The relative error of each kind over pairs and draws."""
    x, y = pairs(norm)
    squares = {kind: torch.zeros(len(x), dtype=x.dtype) for kind in KINDS}
    for seed in range(draws):
        for kind in KINDS:
            squares[kind] += (estimates(kind, x, y, features // per_row(kind), seed, independent) - 1).square()
    return {kind: float((total / draws).mean().sqrt()) for kind, total in squares.items()}


def exact(kind: str, norm: float, features: int) -> float:
    """The same for independent rows, from the variance of one row."""
    x, y = pairs(norm)
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
        a = optimal_a(float(s.mean()), WIDTH)
        growth = 2 * (1 - 4 * a) / (1 - 8 * a) - 1
        variance = ((1 - 4 * a) ** WIDTH / (1 - 8 * a) ** (WIDTH / 2)) * (growth * s).exp() - 1
    return math.sqrt(float(variance.mean()) / rows)


def draw(found: dict[tuple[str, bool], list[list[float]]], axes: list[list[float]], fixed: list[float]) -> Figure:
    """Left against the number of features, right against the norm: lines exact, filled iid, hollow orthogonal."""
    figure = Figure(figsize=(10.5, 4.8), layout="constrained")
    labels = (f"features (x and y of norm {fixed[0]:g})", f"norm of x and of y ({fixed[1]:.0f} features)")
    for i, ax in enumerate(figure.subplots(1, 2)):
        for kind in KINDS:
            points = [(fixed[0], n) if i == 0 else (n, fixed[1]) for n in axes[i]]
            ax.plot(axes[i], [exact(kind, norm, int(number)) for norm, number in points], color=COLORS[kind], lw=1.6)
            for independent, face in ((True, COLORS[kind]), (False, "white")):
                name = f"{kind}, {'iid' if independent else 'orthogonal'} rows"
                look = {"marker": "o" if independent else "D", "markersize": 5.5, "linestyle": "", "label": name}
                ax.plot(axes[i], found[kind, independent][i], color=COLORS[kind], markerfacecolor=face, **look)
        ax.set_yscale("log")
        ax.set_xlabel(labels[i])
        drawing.ticks(ax.yaxis, ax.get_ylim(), lambda y: f"{y:g}")
        if i == 0:
            ax.set_xscale("log", base=2)
            ax.set_xticks(axes[0], [f"{n:,.0f}" for n in axes[0]])
            ax.set_ylabel("relative error of the estimate of exp(x·y)")
            handles = ax.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4)
    figure.suptitle(
        "Random features of the softmax kernel, D = 64; lines: exact for iid rows", x=0.01, ha="left", fontsize=11.5
    )
    return figure


def main() -> None:
    parser = sheet.arguments(
        __doc__, (16, 64, 256, 1024), norms=(0.25, 0.5, 0.75, 1.0, 1.5, 2.0), norm=1.0, features=64, draws=300
    )
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    axes = [[float(n) for n in given.lengths], list(given.norms)]
    torch.set_num_threads(given.threads)
    places = [[(given.norm, n) for n in given.lengths], [(norm, given.features) for norm in given.norms]]
    errors = {
        independent: [[measured(*place, given.draws, independent) for place in panel] for panel in places]
        for independent in (True, False)
    }
    found = {
        (kind, independent): [[of[kind] for of in panel] for panel in errors[independent]]
        for kind in KINDS
        for independent in errors
    }
    if given.figure:
        with drawing.look():
            given.figure.write_bytes(drawing.png(draw(found, axes, [given.norm, given.features])))
    parts = [
        f"Relative error √(mean (estimate/e^(x·y) − 1)²) over {PAIRS} pairs x, y in random directions at D = {WIDTH} "
        f"and {given.draws} draws: iid rows as measured, by the exact formula, and orthogonal rows as measured. "
        "Hyperbolic and trigonometric features are two a row, and are counted as two. Large errors of positive "
        "estimates come from rare draws, so that above a norm of 1 the measured means lie below the formula.",
    ]
    for i, what in enumerate(("features", "norm")):
        head = [what, *(f"{kind}, {how}" for kind in KINDS for how in ("iid", "exact", "orthogonal"))]
        rows = []
        for j, at in enumerate(axes[i]):
            of = [(found[kind, True][i][j], exact(kind, *places[i][j]), found[kind, False][i][j]) for kind in KINDS]
            rows.append([f"{at:g}", *(f"{error:.3g}" for three in of for error in three)])
        parts.append(sheet.table(head, rows))
    sheet.publish("Error of random features", parts, given.out, dtype="fp64")


if __name__ == "__main__":
    main()
