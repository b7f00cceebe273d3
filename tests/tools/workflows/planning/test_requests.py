"""Whole requests in a plan: exact attention and the plan, to the first token, for each further one, and in all."""

import json
from dataclasses import asdict, replace
from math import exp

import pytest
from typer.testing import CliRunner

from subquad.core.errors import InputError
from subquad.tools.cli.main import app
from subquad.tools.models.generation import RowSteps, StepTimes
from subquad.tools.plan.loads import PlanInputs
from subquad.tools.plan.measure import PassTimes
from subquad.tools.plan.planning import requests_of
from subquad.tools.plan.planning_results import Planned, Verified
from subquad.tools.plan.prepared import prepare
from subquad.tools.plan.report import headline
from subquad.tools.plan.schema import PlannedLength, Verification
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.plan.tables import requests
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.jobs import silent
from tests.tools.report.sample_plan import plan
from tests.tools.workflows.planning.steady import make_steady

pytestmark = pytest.mark.slow

STEPS = StepTimes({"full": RowSteps([0.2, 0.1, 0.2]), "plan": RowSteps([0.1, 0.1, 0.1], kl=0.0)}, {"fp32": 1.0})


def planned(**changed):
    verified = Verified({0: "local"}, 0.0, [0.0], 0.0, [2.0])
    made = {"passes": PassTimes(4.0, 0.0, 0.0), "verified": verified, "steps": STEPS, "has_exact_steps": True}
    return Planned(64, **(made | changed))


LOAD = PlanInputs(64, None, print, max, [], [], new_tokens=11)


def test_a_request_is_the_prefill_and_its_steps():
    found = requests_of(planned(), LOAD)
    assert asdict(found.exact) == pytest.approx({"first_ms": 4000, "step_ms": 200, "ms": 6000})
    assert asdict(found.plan) == pytest.approx({"first_ms": 2000, "step_ms": 100, "ms": 3000})
    assert (found.step_speedup, found.speedup) == pytest.approx((2.0, 2.0))
    assert (found.new_tokens, found.exact_steps, found.step_kl) == (11, True, 0.0)


@pytest.mark.parametrize("changed", [{"steps": None}, {"verified": None}])
def test_without_steps_or_a_plan_there_are_no_requests(changed):
    assert requests_of(planned(**changed), LOAD) is None


def test_refused_steps_leave_requests_out():
    refused = StepTimes(STEPS.rows | {"plan": RowSteps(reason="no steps")}, {})
    assert requests_of(planned(steps=refused), LOAD) is None


def test_the_headline_and_the_table_have_both_speeds():
    exact = PlannedLength(128, layers={}, rounds=[], floors=[], passages=2, tried=1)
    verified = Verification(predicted=0.01, loss=0.01, bound=0.02, speedup=2.0, passages=3)
    length = replace(exact, length=64, verified=verified, requests=requests_of(planned(), LOAD))
    said = headline([length], Floor("kl", 0.1))
    assert "2.00× the speed of exact attention at 64 tokens to the first token and 2.00× with 11 new ones" in said
    table = requests(replace(plan(), lengths=[length, exact]))
    assert [line.name for line in table.lines] == ["64 + 11 tokens"]
    assert [cell.text for cell in table.lines[0].cells][-3:] == ["2.00×", "2.00×", "2.00×"]


def words(model, text, tmp_path, *more):
    fixed = ["plan", model("llama"), "--text", str(text), "--lengths", "64", "--max-kl", "5", "--shift", "1"]
    return [*fixed, "--methods", "local:window=12", "--dtype", "fp32", "--out", str(tmp_path), "--json", *more]


@pytest.mark.parametrize("count", ["7", "0"])
def test_a_plan_of_a_decoder(model, text, tmp_path, monkeypatch, count):
    make_steady(monkeypatch.setattr)
    done = CliRunner().invoke(app, words(model, text, tmp_path, "--new-tokens", count))
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    (length,) = report["lengths"]
    assert length["verified"]["loss"] <= 1 - exp(-5)
    kept = json.loads((tmp_path / "plan.json").read_text())["verified"]["64"]
    if count == "0":
        assert "requests" not in length
        assert "requests" not in kept
        return
    found = length["requests"]
    assert kept["requests"] == found
    assert found["new_tokens"] == 7
    assert not found["exact_steps"]
    assert found["step_kl"] > 0
    assert any("The plan's steps are not exact attention" in note for note in report["notes"])
    assert "with 7 new ones" in report["headline"]
    assert "Whole requests" in (tmp_path / "report.md").read_text()


def test_more_tokens_than_positions_are_refused(model, text, tmp_path):
    settings = PlanSettings(model("llama"), (text,), max_kl=1.0, lengths=(500,), new_tokens=80)
    with pytest.raises(InputError, match="a prompt of 500 tokens makes 580, past the 512 positions"):
        prepare(settings, tmp_path, silent)
