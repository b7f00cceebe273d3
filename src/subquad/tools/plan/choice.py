"""Choose a method for each layer: the least time whose losses add up to no more than what is accepted.

    minimise Σ_l t(l, c_l)   subject to   Σ_l loss(l, c_l) ≤ budget            one candidate c_l in each layer l

Losses of single layers add up almost exactly (`benchmarks/plans.py` compares the sum with measurements), so that this
multiple-choice knapsack chooses well; a verification corrects the rest.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from subquad.audits.statistics import share_upper
from subquad.methods.full import EXACT
from subquad.tools.measure.tradeoff import EQUAL, NARROW, PROVES, SIMILAR, UNNOTICED

ByLayer = Mapping[int, Mapping[str, float]]  # by layer and candidate
GAIN = 0.97  # a candidate that takes more of exact attention's time in a layer is left out
FASTER = 1.02  # a plan that is not so much faster is exact attention
ROUNDS = 4  # verifications of a plan, at most
VERIFICATIONS = ROUNDS + 1  # with that of the best single method, which may be taken too
CONFIDENCE = 0.95  # that a verified fidelity is at least its bound, over all verifications


def cheapest(seconds: ByLayer, losses: ByLayer, budget: float) -> dict[int, str]:
    """The candidate of each layer: the least sum of seconds with a sum of losses of at most `budget`.

    Every layer needs a candidate without loss, exact attention, so that there is always a choice.
    """
    if (chosen := _least(seconds, [(losses, budget)])) is None:
        raise ValueError(f"no choice has a loss of at most {budget:g}: a layer has no candidate without loss")
    return chosen


def closest(seconds: ByLayer, losses: ByLayer, budget: float, pass_seconds: float) -> dict[int, str]:
    """The candidate of each layer: the least sum of losses, in a pass about as fast as with the `cheapest` choice.

    A pass of exact attention takes `pass_seconds`, and one with the choice at most 5 % more than with the cheapest one.
    Of choices with equal losses, it is the fastest.
    """
    fastest = cheapest(seconds, losses, budget)
    saved = sum(seconds[layer][EXACT] - seconds[layer][name] for layer, name in fastest.items())
    slack = (SIMILAR - 1) * max(pass_seconds - saved, 0.0)
    unit_of_loss, unit_of_time = max(budget, 1e-12), max(slack, 1e-12)
    worth = {
        layer: {
            name: max(loss, 0.0) / unit_of_loss + EQUAL * seconds[layer][name] / unit_of_time
            for name, loss in by_name.items()
        }
        for layer, by_name in losses.items()
    }
    limits = [(losses, max(budget, total(losses, fastest))), (seconds, total(seconds, fastest) + slack)]
    return _least(worth, limits) or fastest


def _least(costs: ByLayer, limits: Sequence[tuple[ByLayer, float]]) -> dict[int, str] | None:
    """The candidate of each layer with the least sum of costs whose sums of others are limited; None if none is."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    pairs = [(layer, name) for layer in costs for name in costs[layer]]
    one_each = np.array([[float(layer == other) for other, _ in pairs] for layer in costs])
    rules = [LinearConstraint(one_each, 1, 1)]
    for values, limit in limits:
        # Values in units of the limit: the solver's tolerance is absolute.
        scale = max(limit, 1e-12)
        row = np.array([max(values[layer][name], 0.0) for layer, name in pairs])
        rules.append(LinearConstraint((row / scale)[None], -np.inf, max(limit, 0.0) / scale))
    cost = np.array([costs[layer][name] for layer, name in pairs])
    solution = milp(cost / (cost.max() or 1.0), integrality=np.ones(len(pairs)), bounds=Bounds(0, 1), constraints=rules)
    if solution.x is None:
        return None
    return {layer: name for (layer, name), taken in zip(pairs, solution.x, strict=True) if taken > 0.5}


def tied(losses: ByLayer, kernels: Collection[str]) -> int:
    """The number of tied candidates: all but exact `kernels`, if the loss of each in all layers is too small to notice.

    0 if they are told apart; a single candidate always is.
    """
    names = {name for layer in losses.values() for name in layer} - {EXACT, *kernels}
    unnoticed = all(total(losses, uniform(losses, name)) < UNNOTICED for name in names)
    return len(names) if len(names) > 1 and unnoticed else 0


def provable(accepted: float, without: float | None) -> float:
    """The accepted loss, or a tenth of the loss without attention if that is small, and the tenth is less."""
    return accepted if without is None or without > NARROW else min(accepted, max(without, 0.0) / PROVES)


def total(values: ByLayer, chosen: Mapping[int, str]) -> float:
    """The sum over the layers of what was chosen."""
    return sum(max(values[layer][name], 0.0) for layer, name in chosen.items())


def best_uniform(seconds: ByLayer, losses: ByLayer, budget: float) -> str | None:
    """The fastest single candidate in all layers that have it, exact attention in the others; None where none fits."""
    names = {name for layer in losses.values() for name in layer} - {EXACT}
    mixes = {name: uniform(losses, name) for name in names}
    able = [name for name, mix in mixes.items() if total(losses, mix) <= budget]
    return min(able, key=lambda name: total(seconds, mixes[name]), default=None)


def uniform(losses: ByLayer, name: str) -> dict[int, str]:
    """One candidate in every layer that has it."""
    return {layer: name if name in candidates else EXACT for layer, candidates in losses.items()}


def upper_bound(losses: Sequence[float], confidence: float, count: int | None = None, *, binary: bool = False) -> float:
    """A bound on the mean loss at a confidence, by Student's t: mean + t·s/√n.

    It assumes that passages are independent and their losses are about normally distributed. Losses of a metric that is
    right or wrong are not: with `binary`, where all are −1, 0 or 1, the bound is that of Clopper and Pearson on the
    share of 1. With `count`, what the bound of that number of losses with the same mean and spread would be. Infinite
    of fewer than two losses, or if one is not finite.
    """
    from scipy.stats import t

    n = len(losses)
    if n < 2 or not all(map(math.isfinite, losses)):
        return math.inf
    if binary and {-1.0, 0.0, 1.0}.issuperset(losses):
        worse = sum(loss > 0 for loss in losses) / n
        return share_upper(math.ceil(worse * (count or n)), count or n, 1 - confidence)
    mean = sum(losses) / n
    spread = math.sqrt(sum((loss - mean) ** 2 for loss in losses) / (n - 1))
    n = count or n
    return mean + float(t.ppf(confidence, n - 1)) * spread / math.sqrt(n)


def of_round(confidence: float = CONFIDENCE, verifications: int = VERIFICATIONS) -> float:
    """The confidence of a single verification, so that all together have the one that is wanted (Bonferroni)."""
    return 1 - (1 - confidence) / verifications


def with_room(
    seconds: ByLayer,
    losses: Mapping[int, Mapping[str, Sequence[float]]],
    accepted: float,
    confidence: float,
    held_out: int,
    *,
    binary: bool = False,
) -> float:
    """The largest budget whose choice should be verified: its bound on `held_out` passages is at most `accepted`.

    The spread over passages is that of the sums of single losses on the passages that were measured. One passage has
    none: half of what is accepted is left for it then.
    """
    if any(len(each) == 1 for passages in losses.values() for each in passages.values()):
        return accepted / 2
    means = {
        n: {EXACT: 0.0} | {x: sum(each) / len(each) for x, each in passages.items()} for n, passages in losses.items()
    }
    budget = accepted
    for _ in range(12):
        chosen = {n: name for n, name in cheapest(seconds, means, budget).items() if name != EXACT}
        if not chosen:
            return budget
        sums = [sum(each) for each in zip(*(losses[n][name] for n, name in chosen.items()), strict=True)]
        expected = upper_bound(sums, confidence, count=held_out, binary=binary)
        if expected <= accepted:
            return budget
        budget *= max(0.98 * accepted / expected, 0.5)
    return budget


def next_budget(budget: float, accepted: float, bound: float) -> float:
    """The budget for the next round, after one in which the bound came out as `bound` and `accepted` was asked for."""
    return budget * max(min(0.9 * accepted / bound, 0.8), 0.2) if bound > 0 else budget


def crossover(lengths: Sequence[int], faster: Sequence[bool], end: int) -> int:
    """The shortest of some lengths, in order, from which on it is faster at every length; `end` where there is none."""
    start = end
    for length, wins in reversed(list(zip(lengths, faster, strict=True))):
        if not wins:
            break
        start = length
    return start
