"""Tests of how much of a plan is measured in the time that there is."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import subquad as sq
from subquad.core.errors import InputError
from subquad.tools.measure.deadline import GRACE
from subquad.tools.plan import length as planning
from subquad.tools.plan import run as running
from subquad.tools.plan.effort import (
    KEPT,
    MEASURING,
    PASSAGES,
    VERIFIED,
    PassCost,
    PlanEffort,
    affordable,
    affordable_verification,
    least_seconds,
    spread_out,
)
from subquad.tools.plan.loads import PlanInputs, input_loads
from subquad.tools.plan.measure import Candidate, Screen, SingleLosses, screen
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.plan.workers import UNAIDED, Workers
from subquad.tools.runs.executors import LocalExecutor
from tests.tools.workflows.planning.steady import make_steady
from tests.tools.workflows.planning.test_measure import inputs, sharp

LATEST = 1 + 2 * GRACE  # of a plan, in its limits: the grace, and as much again where a prediction was too low
DECODER = PassCost(seconds=4.0, loss_seconds=2.0, single_loss_seconds=0.5, layers=30, chained=True)


def test_everything_is_measured_if_there_is_time():
    assert affordable(DECODER, 7200.0) == PlanEffort(KEPT, 1, DECODER.of_losses(KEPT, 1))


@pytest.mark.parametrize("seconds", [100.0, 240.0, 300.0, 600.0, 1200.0, 2400.0, 7200.0])
def test_what_is_measured_fits_into_its_share_and_leaves_time_to_verify(seconds):
    effort = affordable(DECODER, seconds)
    assert PASSAGES * effort.seconds <= max(MEASURING * seconds, DECODER.of_least_losses)
    assert DECODER.of_verification(VERIFIED, 2) + DECODER.afterwards <= seconds - PASSAGES * effort.seconds


def test_fewer_candidates_come_before_several_layers_at_a_time():
    efforts = [affordable(DECODER, float(seconds)) for seconds in range(150, 7200, 50)]
    sizes = [(each.together, -each.candidates) for each in efforts]
    assert sizes == sorted(sizes, reverse=True)
    assert {each.together for each in efforts} >= {1, 2, 4}


def test_nothing_is_measured_if_the_least_takes_too_long():
    assert affordable(DECODER, DECODER.of_minimum + 1) == PlanEffort(1, 30, DECODER.of_losses(1, 30))
    assert affordable(DECODER, DECODER.of_minimum - 1) is None
    assert least_seconds(4.0, 2.0) > DECODER.of_minimum
    assert least_seconds(8.0, 4.0) == pytest.approx(2 * least_seconds(4.0, 2.0))


def test_a_model_whose_blocks_are_no_chain_takes_whole_passes():
    whole = PassCost(4.0, 2.0, 0.5, 30, chained=False)
    assert whole.of_losses(1, 1) == pytest.approx(4.5 + 30 * 4.5)
    assert DECODER.of_losses(1, 1) == pytest.approx(4.5 + 30 * (4.0 * 31 / 60 + 0.5))


@pytest.mark.parametrize(("seconds", "passages", "uniform"), [
    (0.0, 3, False),
    (73.0, 3, False),
    (80.0, 3, True),
    (308.0, 8, True),
    (1e4, 8, True),
])  # fmt: skip
def test_passages_to_verify_on_follow_from_the_time_that_is_left(seconds, passages, uniform):
    on = affordable_verification(DECODER, seconds, held_out=8)
    assert (on.passages, on.with_uniform) == (passages, uniform)


def test_a_machine_that_is_slower_than_predicted_has_greater_costs():
    assert DECODER.slower(2.0).reserve == pytest.approx(2 * DECODER.reserve)
    assert DECODER.slower(2.0).of_losses(3, 2) == pytest.approx(2 * DECODER.of_losses(3, 2))


def test_with_time_for_one_candidate_the_closest_one_is_measured(unchecked, monkeypatch):
    errors = {"local:window=12": 0.1, "local:window=2": 0.9, "clustered:clusters=8": 0.3}
    seconds = {"full": 1.0, "local:window=12": 0.6, "local:window=2": 0.2, "clustered:clusters=8": 0.4}
    candidates = [Candidate(name, {0: sq.methods.resolve(name)}) for name in errors]
    effort = affordable(DECODER, DECODER.of_minimum + 1)
    assert effort.candidates == 1
    load = SimpleNamespace(items=[None] * 3)
    one = planning.Length(load, candidates, 0.9, 1.0, None, None, 1.0)
    monkeypatch.setattr(one, "_measured", lambda wanted, *_: ([(each, 0.0) for each in wanted], 1.0))
    losses, _ = one.losses(Screen({"0": seconds}, {"0": errors}), effort)
    assert losses == {0: {"local:window=12": [0.0] * 3}}


@pytest.mark.parametrize("count", [3, 6, 12, 30])
def test_the_first_few_of_an_order_are_spread_over_all(count):
    order = spread_out(count)
    assert sorted(order) == list(range(count))
    few = sorted(order[:3])
    assert few[0] == 0
    assert few[-1] >= count / 2


def test_neighbouring_layers_share_what_they_lose_together():
    model = sharp("bert")
    load = input_loads(model, inputs(), None)[0]
    losses, window = SingleLosses(load), sq.Local(window=3)
    alone, together = [losses.loss(0, {n: window}) for n in (0, 1)], losses.loss(0, {0: window, 1: window})
    assert alone[0] != alone[1]
    whole = input_loads(model, inputs(), None)[0]
    exact = whole.run(whole.items[0])
    sq.hf.swap(model, sq.Local(window=3))
    assert together == pytest.approx(whole.loss(whole.run(whole.items[0]), exact), rel=1e-4)


@pytest.mark.parametrize(("allowed", "screened"), [(1e9, 6), (0.0, 3)])
def test_layers_are_screened_as_long_as_there_is_time(allowed, screened, monkeypatch):
    import transformers

    make_steady(monkeypatch.setattr)

    config = transformers.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=16
    )
    load = input_loads(transformers.BertModel(config).eval(), inputs(), None)[0]
    found = screen(load, [Candidate("window", {n: sq.Local(window=3) for n in range(6)})], allowed)
    with_errors = [int(number) for number, errors in found.errors.items() if errors]
    assert len(with_errors) == screened
    assert max(with_errors) - min(with_errors) >= 3  # spread over the model
    assert len(found.seconds) == 6


# A pass takes a second in these, and time passes only where a pass is predicted or run.


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves on by the seconds of each pass, whole or from some block on."""
    make_steady(monkeypatch.setattr)
    now = [0.0]
    monkeypatch.setattr("subquad.tools.measure.deadline.time.perf_counter", lambda: now[0])

    def passing(load, rate=1.0):
        run = load.run

        def slow(item):
            now[0] += rate
            return run(item)

        return replace(load, run=slow)

    of_inputs = running.input_loads
    monkeypatch.setattr(
        running, "input_loads", lambda *given: [passing(load, (load.length / 20) ** 2) for load in of_inputs(*given)]
    )
    return now


class Shared(LocalExecutor):
    """Three workers that share the processors: a batch of three passes takes three passes of this process."""

    description = "3 processes"
    width = 3


@pytest.mark.slow
def test_workers_that_share_the_processors_leave_as_much_time_to_verify(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(PlanInputs, "chain", lambda self: None)
    methods = [sq.methods.resolve(name) for name in ("local:window=12", "local:window=2", "clustered:clusters=8")]
    verified = []
    for workers in (False, True):
        clock[0] = 0.0
        loads, metadata = running._of_inputs(sharp("bert"), inputs(36, 28), None)  # passes of two seconds
        losses = SingleLosses(loads[0])

        def elsewhere(length, item, candidate, layers, losses=losses):
            return losses.loss(item, dict.fromkeys(layers, sq.methods.resolve(candidate)))

        aided = Workers(Shared(), elsewhere) if workers else UNAIDED
        settings = PlanSettings(min_fidelity=0.3, minutes=4.0, shift=1.0)
        made = running.plan_loads(
            loads, settings, methods, {}, tmp_path / str(workers), lambda *_: None, metadata, "sq.plan", aided
        )
        verified.append(len(made.planning.lengths[0].rounds[0].losses))
    assert 3 < verified[0] < 24  # time is short
    assert verified[1] >= 0.8 * verified[0]


def test_the_documented_lateness_is_the_tested_one():
    assert pytest.approx(1.2) == LATEST
    page = Path(__file__).parents[4] / "docs" / "how-to" / "plan.md"
    assert "may exceed it by up to a fifth" in page.read_text("utf-8")
    assert "how long it may take, within a fifth" in sq.plan.__doc__


WINDOW = {"min_fidelity": 0.3, "methods": ["local:window=2"]}


@pytest.mark.slow
def test_a_plan_without_time_for_anything_is_an_error_with_the_minutes_that_are_needed(clock):
    with pytest.raises(
        InputError, match=r"minutes 0\.1 is too little to decide anything: an exact pass at 20"
    ) as error:
        sq.plan(sharp("bert"), inputs(18), minutes=0.1, **WINDOW)
    assert clock[0] <= 0.1 * 60 * LATEST
    (needed,) = re.findall(r"give --minutes ([\d.]+) or more", str(error.value))
    begun = clock[0]
    found = sq.plan(sharp("bert"), inputs(18), minutes=float(needed), **WINDOW).verified["20"]
    assert found["passages"] >= 3
    assert clock[0] - begun <= float(needed) * 60 * LATEST


@pytest.mark.slow
@pytest.mark.parametrize("minutes", [1.0, 2.0, 4.0])
def test_a_plan_ends_in_time_and_is_verified_on_as_many_passages_as_there_is_time_for(clock, minutes):
    found = sq.plan(sharp("bert"), inputs(60), minutes=minutes, **WINDOW).verified["20"]
    assert clock[0] <= LATEST * 60 * minutes
    assert found["passages"] >= 3
    assert found["bound"] >= 0.3


@pytest.mark.slow
def test_the_longest_length_is_left_out_first_and_the_plan_says_so(clock):
    plan = sq.plan(sharp("bert"), [*inputs(12), *inputs(12, 60)], minutes=1.0, **WINDOW)
    assert clock[0] <= LATEST * 60
    assert plan.verified["20"]["passages"] >= 3
    why = plan.verified["60"]["exact_because"]
    assert why.startswith("nothing was decided: measuring and verifying takes about")
    assert all(method.method_at(60) == sq.Full() for method in plan.layers.values())


@pytest.mark.slow
def test_a_machine_that_becomes_slow_still_verifies_in_time(clock, monkeypatch):
    """Everything takes four times as long from the losses on."""
    loss = SingleLosses.loss

    def slow(self, item, methods):
        clock[0] += 3.0
        return loss(self, item, methods)

    held_out_pass = planning.held_out_pass

    def slow_pass(*given, **options):
        clock[0] += 6.0
        return held_out_pass(*given, **options)

    monkeypatch.setattr(SingleLosses, "loss", slow)
    monkeypatch.setattr(planning, "held_out_pass", slow_pass)
    found = sq.plan(sharp("bert"), inputs(30), minutes=3.0, **WINDOW).verified["20"]
    assert found["passages"] >= 3 or found["exact_because"].startswith("nothing was decided")
    assert clock[0] <= LATEST * 180
