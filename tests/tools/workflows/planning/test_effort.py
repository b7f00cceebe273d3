"""How much of a plan is measured in the time that there is."""

import pytest

import subquad as sq
from subquad.tools.plan.effort import (
    AFTERWARDS,
    KEPT,
    MEASURING,
    PASSAGES,
    VERIFIED,
    PassCost,
    PlanEffort,
    affordable,
    verified_passages,
)
from subquad.tools.plan.loads import input_loads
from subquad.tools.plan.measure import Candidate, screen, single_losses
from tests.tools.workflows.planning.steady import make_steady
from tests.tools.workflows.planning.test_measure import inputs, sharp

DECODER = PassCost(seconds=4.0, loss_seconds=0.5, layers=30, chained=True)


def test_everything_is_measured_if_there_is_time():
    assert affordable(DECODER, 7200.0) == PlanEffort(KEPT, 1, DECODER.of_losses(KEPT, 1))


@pytest.mark.parametrize("seconds", [240.0, 300.0, 600.0, 1200.0, 2400.0, 7200.0])
def test_what_is_measured_fits_into_its_share_and_leaves_time_to_verify(seconds):
    effort = affordable(DECODER, seconds)
    assert PASSAGES * effort.seconds <= MEASURING * seconds
    left = (1 - MEASURING) * seconds
    assert DECODER.of_verification(VERIFIED, 3) + AFTERWARDS * DECODER.seconds <= left


def test_fewer_candidates_come_before_several_layers_at_a_time():
    efforts = [affordable(DECODER, float(seconds)) for seconds in range(250, 7200, 50)]
    sizes = [(each.together, -each.candidates) for each in efforts]
    assert sizes == sorted(sizes, reverse=True)
    assert {each.together for each in efforts} >= {1, 2, 4}


def test_nothing_is_measured_if_the_least_takes_too_long():
    assert affordable(DECODER, DECODER.of_minimum + 1) is not None
    assert affordable(DECODER, DECODER.of_minimum - 1) is None


def test_a_model_whose_blocks_are_no_chain_takes_whole_passes():
    whole = PassCost(4.0, 0.5, 30, chained=False)
    assert whole.of_losses(1, 1) == 2 * 4.0 + 30 * 4.5
    assert DECODER.of_losses(1, 1) == 2 * 4.0 + 30 * (4.0 * 31 / 60 + 0.5)


@pytest.mark.parametrize(("seconds", "passages"), [(0.0, 3), (100.0, 3), (216.0, 8), (1e4, 8)])
def test_passages_to_verify_on_follow_from_the_time_that_is_left(seconds, passages):
    assert verified_passages(DECODER, seconds, held_out=8) == passages


def test_neighbouring_layers_share_what_they_lose_together():
    model = sharp("bert")
    load = input_loads(model, inputs(), None, None)[0]
    tried = {n: [Candidate("window", {0: sq.Local(window=3), 1: sq.Local(window=3)})] for n in (0, 1)}
    alone, together = (single_losses(load, load.items[0], tried, count) for count in (1, 2))
    assert together["0"] == together["1"]
    assert alone["0"] != alone["1"]
    whole = input_loads(model, inputs(), None, None)[0]
    exact = whole.run(whole.items[0])
    sq.hf.swap(model, sq.Local(window=3))
    assert 2 * together["0"]["window"] == pytest.approx(whole.loss(whole.run(whole.items[0]), exact), rel=1e-4)


@pytest.mark.parametrize(("allowed", "screened"), [(1e9, 6), (0.0, 3)])
def test_layers_are_screened_as_long_as_there_is_time(allowed, screened):
    import transformers

    config = transformers.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=16
    )
    load = input_loads(transformers.BertModel(config).eval(), inputs(), None, None)[0]
    found = screen(load, [Candidate("window", {n: sq.Local(window=3) for n in range(6)})], allowed)
    with_errors = [int(number) for number, errors in found.errors.items() if errors]
    assert len(with_errors) == screened
    assert max(with_errors) - min(with_errors) >= 3  # spread over the model
    assert len(found.seconds) == 6


@pytest.mark.slow
def test_a_plan_without_time_is_exact_and_says_what_is_missing(monkeypatch):
    """A pass takes a second here."""
    make_steady(monkeypatch.setattr)
    plan = sq.plan(sharp("bert"), inputs(18), min_fidelity=0.3, methods=["local:window=2"], minutes=0.1)
    assert set(plan.layers.values()) == {sq.Full()}
    assert plan.verified["20"]["exact_because"].startswith("measuring and verifying takes about 46 s at least, of")
    assert plan.verified["20"]["exact_because"].endswith("were left; give more --minutes")


@pytest.mark.slow
def test_a_plan_with_little_time_is_verified_on_fewer_passages(monkeypatch):
    make_steady(monkeypatch.setattr)
    options = {"min_fidelity": 0.3, "methods": ["local:window=2"]}
    verified = {
        minutes: sq.plan(sharp("bert"), inputs(18), minutes=minutes, **options).verified["20"]
        for minutes in (0.8, 10.0)
    }
    assert [each["passages"] for each in verified.values()] == [3, 12]
    assert verified[0.8]["bound"] < verified[10.0]["bound"]
