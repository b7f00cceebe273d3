"""The knapsack is the best of all choices; bounds hold as often as they say."""

import itertools
import random
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from subquad.tools.plan import choice
from subquad.tools.plan.grid import grid, pareto
from subquad.tools.plan.length import MESSAGES
from subquad.tools.plan.measure import PassTimes, Screen
from subquad.tools.plan.planner import Planner
from subquad.tools.plan.planning_results import Planned, Verified


def instance(seed: int) -> tuple[dict, dict]:
    draw = random.Random(seed)
    names = ["full", *"abcd"[: draw.randint(1, 4)]]
    layers = range(draw.randint(1, 5))
    losses = {n: {x: 0.0 if x == "full" else 10 ** draw.uniform(-5, -1) for x in names} for n in layers}
    seconds = {n: {x: 1.0 if x == "full" else draw.uniform(0.1, 1.2) for x in names} for n in layers}
    return seconds, losses


@pytest.mark.parametrize("seed", range(25))
def test_the_choice_is_the_fastest_of_all_that_fit(seed):
    seconds, losses = instance(seed)
    budget = 10 ** random.Random(seed + 100).uniform(-4, -1)
    chosen = choice.cheapest(seconds, losses, budget)
    every = (dict(zip(losses, mix, strict=True)) for mix in itertools.product(*losses.values()))
    best = min(choice.total(seconds, mix) for mix in every if choice.total(losses, mix) <= budget)
    assert choice.total(losses, chosen) <= budget * (1 + 1e-5)
    assert choice.total(seconds, chosen) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("seed", range(25))
def test_of_all_choices_about_as_fast_the_closest_is_taken(seed):
    seconds, losses = instance(seed)
    budget = 10 ** random.Random(seed + 100).uniform(-4, -1)
    whole = 2.0 + len(losses)
    chosen = choice.closest(seconds, losses, budget, whole)
    fastest = choice.cheapest(seconds, losses, budget)
    outside = whole - len(losses)
    most = 1.05 * (outside + choice.total(seconds, fastest))
    every = (dict(zip(losses, mix, strict=True)) for mix in itertools.product(*losses.values()))
    least = min(choice.total(losses, mix) for mix in every if outside + choice.total(seconds, mix) <= most)
    assert outside + choice.total(seconds, chosen) <= most * (1 + 1e-5)
    assert choice.total(losses, chosen) <= min(least + 0.011 * budget * len(losses), budget * (1 + 1e-5))


def test_a_plan_is_not_lossy_for_nothing():
    """Layers in which a crude method is hardly faster than the exact kernel run the exact kernel."""
    seconds = {n: {"full": 1.0, "kernel": 0.6, "crude": 0.55} for n in range(6)}
    losses = {n: {"full": 0.0, "kernel": 0.0, "crude": 0.0006} for n in range(6)}
    assert set(choice.cheapest(seconds, losses, 0.01).values()) == {"crude"}
    assert set(choice.closest(seconds, losses, 0.01, 12.0).values()) == {"kernel"}
    for by_name in seconds.values():
        by_name["crude"] = 0.1
    assert set(choice.closest(seconds, losses, 0.01, 12.0).values()) == {"crude"}


def test_candidates_that_all_lose_nothing_are_not_distinguished():
    losses = {n: {"full": 0.0, "kernel": 0.0, "crude": 1e-6, "close": 1e-7} for n in range(6)}
    assert choice.tied(losses, ["kernel"]) == 2
    assert choice.tied(losses | {6: {"full": 0.0, "crude": 1e-4}}, ["kernel"]) == 0
    assert choice.tied(losses, ["kernel", "close"]) == 0  # there is nothing to tell it apart from


def test_a_tenth_of_the_loss_without_attention_is_accepted_at_most():
    assert choice.provable(0.01, 0.05) == pytest.approx(0.005)
    assert choice.provable(0.01, 0.5) == choice.provable(0.01, None) == 0.01
    assert choice.provable(0.2, 0.5) == 0.2  # of a scale as long as that, more than a tenth proves something
    assert choice.provable(0.01, -1.0) == 0.0


def test_without_room_for_a_loss_everything_stays_exact():
    seconds, losses = instance(3)
    assert set(choice.cheapest(seconds, losses, 0.0).values()) == {"full"}


def test_one_passage_leaves_half_of_what_is_accepted_for_the_spread():
    seconds, losses = {0: {"full": 1.0, "a": 0.5}}, {0: {"a": [0.01]}}
    assert choice.with_room(seconds, losses, 0.1, 0.95, 8) == 0.05
    assert choice.with_room(seconds, {0: {"a": [0.01, 0.01]}}, 0.1, 0.95, 8) == 0.1


def test_a_loss_below_zero_makes_no_room_for_others():
    losses = {0: {"full": 0.0, "a": -1.0}, 1: {"full": 0.0, "a": 0.5}}
    seconds = {n: {"full": 1.0, "a": 0.5} for n in losses}
    assert choice.cheapest(seconds, losses, 0.1) == {0: "a", 1: "full"}


def test_a_layer_without_exact_attention_is_named_as_the_reason():
    with pytest.raises(ValueError, match="a layer has no candidate without loss"):
        choice.cheapest({0: {"a": 1.0}}, {0: {"a": 0.5}}, 0.1)


def test_the_best_uniform_choice_leaves_exact_what_cannot_run_it():
    losses = {0: {"full": 0.0, "a": 0.01, "b": 0.001}, 1: {"full": 0.0, "b": 0.002}}
    seconds = {0: {"full": 1.0, "a": 0.1, "b": 0.5}, 1: {"full": 1.0, "b": 0.5}}
    assert choice.best_uniform(seconds, losses, 0.02) == "b"  # 1.0 against 1.1 seconds
    assert choice.best_uniform(seconds, losses, 0.0005) is None
    assert choice.uniform(losses, "a") == {0: "a", 1: "full"}


def test_the_bound_is_above_the_mean_as_often_as_it_says():
    draw, held = random.Random(0), 0
    for _ in range(2000):
        losses = [draw.gauss(0.01, 0.004) for _ in range(8)]
        held += choice.upper_bound(losses, 0.9) >= 0.01
    assert 0.88 <= held / 2000 <= 0.92
    assert choice.upper_bound([0.5], 0.9) == float("inf")
    assert choice.upper_bound([0.5, 0.5, 0.5], 0.9) == 0.5


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_the_bound_of_what_is_right_or_wrong_holds_where_no_loss_was_seen(share):
    draw, held = np.random.default_rng(0), 0
    for _ in range(500):
        losses = (draw.random(20) < share).astype(float).tolist()
        held += choice.upper_bound(losses, 0.9, binary=True) >= share
    assert held >= 0.88 * 500
    bound = partial(choice.upper_bound, confidence=0.9, binary=True)
    assert bound([0.0] * 20) == pytest.approx(1 - 0.1 ** (1 / 20))
    assert bound([0.0] * 5, count=20) == pytest.approx(1 - 0.1 ** (1 / 20))
    assert bound([1.0, -1.0, 0.0, 0.0]) == bound([1.0, 0.0, 0.0, 0.0])


def test_a_graded_loss_of_zero_everywhere_is_bounded_by_zero():
    """A share of the positions of a passage, or a divergence that is cut at 0, is no answer that is right or wrong."""
    assert choice.upper_bound([0.0] * 8, 0.9) == 0.0 < choice.upper_bound([0.0] * 7 + [0.002], 0.9) < 0.001
    seconds, losses = {0: {"full": 1.0, "a": 0.5}}, {0: {"a": [0.0] * 3}}
    assert choice.with_room(seconds, losses, 0.01, 0.95, 8) == 0.01
    assert choice.with_room(seconds, losses, 0.01, 0.95, 8, binary=True) < 0.01


def test_a_speed_up_may_be_too_high_by_what_it_varies_or_by_what_exact_attention_does():
    verified = Verified({}, 0.0, [0.0], 0.0, [1.5, 2.0, 2.4])
    assert verified.noise == pytest.approx(2.0 / 1.5)
    assert replace(verified, of_exact=1.1).noise == 1.1


def test_all_verifications_together_have_the_confidence():
    together = choice.ROUNDS + 1  # the best single method is verified in the first round, and may be what is taken
    assert 1 - together * (1 - choice.of_round()) == pytest.approx(choice.CONFIDENCE)
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "plan.md").read_text("utf-8")
    for number in (22, 90, 459):
        bound = choice.upper_bound([0.0] * number, choice.of_round(), binary=True)
        assert f"{bound:.2f} with {number}" in page


@pytest.mark.parametrize("seed", range(6))
def test_the_first_budget_leaves_room_for_the_bound(seed):
    draw = random.Random(seed)
    seconds, means = instance(seed)
    losses = {
        n: {x: [loss * draw.uniform(0.5, 1.5) for _ in range(6)] for x, loss in of.items() if x != "full"}
        for n, of in means.items()
    }
    budget = choice.with_room(seconds, losses, 0.02, 0.95, 12)
    mean = {n: {"full": 0.0} | {x: statistics.mean(each) for x, each in of.items()} for n, of in losses.items()}
    chosen = {n: x for n, x in choice.cheapest(seconds, mean, budget).items() if x != "full"}
    sums = [sum(losses[n][x][i] for n, x in chosen.items()) for i in range(6)]
    assert not chosen or choice.upper_bound(sums, 0.95, count=12) <= 0.02
    assert 0 < budget <= 0.02


@pytest.mark.parametrize(("bound", "share"), [(0.02, 0.45), (0.0101, 0.8), (1.0, 0.2)])
def test_the_budget_shrinks_by_what_was_too_much(bound, share):
    assert choice.next_budget(1.0, 0.01, bound) == pytest.approx(share)


class Rounds(Planner):
    """A planner whose verification gives the losses of choices by how many layers are approximate."""

    messages, noun, accepted, may_be_binary, candidates = MESSAGES, "passages", 0.00625, False, ()

    def __init__(self, losses):
        self.losses, self.tried = losses, []

    def verification(self, planned, mixes, number):
        self.tried.append(mixes["plan"])
        count = sum(name == "a" for name in mixes["plan"].values())
        losses = [self.losses[count] * (1 + 0.01 * i) for i in range(8)]
        bound = choice.upper_bound(losses, choice.of_round())
        return {"plan": Verified(mixes["plan"], 0.0, losses, bound, [1 + 0.4 * count] * 8)}

    def share_of_next(self, last):
        return 1.0


@pytest.mark.parametrize(("means", "losses", "tried"), [
    ((6e-4, 7e-4), (0.0, 0.002, 0.016), [2, 1]),  # far below what is measured
    ((0.0, 0.0), (0.0, 0.002, 0.016), [2]),  # there is no closer one
])  # fmt: skip
def test_a_choice_that_failed_is_not_verified_again(means, losses, tried):
    planned = Planned(
        512,
        PassTimes(3.0, 0.0, 0.0),
        Screen({str(n): {"full": 1.0, "a": 0.3} for n in (0, 1)}, {}),
        losses={n: {"a": [mean, mean]} for n, mean in enumerate(means)},
        chosen={0: "full", 1: "full"},
    )
    planner = Rounds(losses)
    planner.choose(planned, 8, with_uniform=False)
    assert [list(mix.values()).count("a") for mix in planner.tried] == tried
    assert (planned.verified is not None) == (tried[-1] == 1)
    assert planned.verified is not None or "the last choice has a loss of" in planned.why_exact


@pytest.mark.parametrize(("wins", "start"), [
    ([True] * 3, 10), ([False, True, True], 20), ([True, False, True], 30), ([True, True, False], 40),
])  # fmt: skip
def test_the_crossover_is_where_it_stays_faster(wins, start):
    assert choice.crossover([10, 20, 30], wins, 40) == start


def test_the_front_is_what_nothing_beats_in_both():
    errors = dict(zip("abcde", (3.0, 2.0, 2.5, 1.0, 0.5), strict=True))
    seconds = dict(zip("abcde", (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))
    assert pareto(errors, seconds, 9) == ["a", "b", "d", "e"]
    assert pareto(errors, seconds, 3) == ["a", "d", "e"]
    assert pareto(errors, seconds, 1) == ["e"]  # the closest, which holds most likely
    assert pareto({}, {}, 3) == []


def test_the_grid_grows_with_the_length():
    tails = {n: [m for m in grid(n) if m.name == "clustered-tail"] for n in (512, 2048, 8192)}
    clusters = {n: statistics.mean(m.clusters for m in methods) for n, methods in tails.items()}
    assert clusters[2048] == pytest.approx(2 * clusters[512], rel=0.1)
    assert all(len(set(grid(n))) == len(grid(n)) >= 8 for n in (64, 512, 8192))
