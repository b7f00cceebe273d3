"""Sentences and the next command in the report of a plan."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from subquad.tools.cli.commands import command_line
from subquad.tools.measure.group import ALONE
from subquad.tools.plan.planning_results import Planned, Verified
from subquad.tools.plan.report import headline, next_command
from subquad.tools.plan.schema import PlannedLength, Verification
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.plan.tables import tried
from subquad.tools.runs.floor import Floor
from tests.tools.report.sample_plan import plan

EXACT = PlannedLength(512, layers={}, rounds=[], floors=[], passages=0, tried=16)
UNDECIDED = replace(EXACT, length=4096, tried=0, least_seconds=412.0)
HELD = Verification(predicted=0.004, loss=0.004, bound=0.006, speedup=1.5, passages=3)
VERIFIED = replace(EXACT, length=2048, passages=2, verified=HELD)


def test_the_headline_does_not_recommend_exact_attention_where_nothing_was_decided():
    late = "Nothing was decided at 4,096 tokens, for want of time."
    assert headline([VERIFIED, UNDECIDED], Floor()) == (
        f"With fidelity ≥ 0.99: 1.50× the speed of exact attention at 2,048 tokens (fidelity 0.996). {late}"
    )
    assert headline([EXACT, UNDECIDED], Floor()) == (
        f"Stay with exact attention: at 512 tokens no verified plan with fidelity ≥ 0.99 pays. {late}"
    )
    assert "Nothing was decided" not in headline([EXACT, VERIFIED], Floor())


def test_what_was_tried_names_the_time_that_is_missing():
    assert tried(replace(plan(), lengths=[VERIFIED, UNDECIDED])) == [
        "2,048 tokens: 16 candidates were tried on 2 passages, and the plan was verified on 3 held-out passages.",
        "4,096 tokens: nothing was decided, which takes about 412 seconds at least.",
    ]


def test_the_headline_names_what_a_gain_costs_and_what_is_free():
    planned = replace(VERIFIED, lossless=1.21, verified=replace(HELD, loss=0.0039))
    assert headline([planned], Floor()) == (
        "With fidelity ≥ 0.99: 1.50× the speed of exact attention at 2,048 tokens (fidelity 0.996; 1.21× is predicted "
        "without a loss)."
    )


def test_a_text_that_does_not_tell_methods_apart_comes_first():
    why = "all 9 approximations have the fidelity of exact attention, 1.0000 (without attention: 0.9000)"
    assert headline([replace(EXACT, unproven=why)], Floor()).startswith(
        f"This text does not tell methods apart: at 512 tokens, {why}. Stay with exact attention"
    )


def test_the_next_command_compares_where_the_plan_is_not_exact(unchecked):
    verified = Verified({0: "local"}, 0.0, [0.0], 0.0, [2.0])
    lengths = [Planned(512), Planned(2048, verified=verified), Planned(4096, verified=verified)]
    planning = SimpleNamespace(lengths=lengths, loads=[SimpleNamespace(group=ALONE)])
    made = SimpleNamespace(planning=planning, metadata={"dtype": "float32"})
    compare = partial(command_line, "compare")
    command = next_command(made, PlanSettings(lengths=(512, 2048, 4096)), Path("out"), compare)
    assert "--lengths 2048,4096" in command
    assert "512" not in command
    assert command.startswith("subquad compare demo-encoder ")
    assert "--dtype fp32" in command
    assert "--batch 8" in next_command(made, PlanSettings(batch=8), Path("out"), compare)
    extended = next_command(made, PlanSettings(extend=8192, new_tokens=64), Path("out"), compare)
    assert "--extend 8192 " in extended  # without it, lengths past the model's positions are refused
    assert "--new-tokens 64" in extended
    made.metadata["dtype"] = "bfloat16"
    assert "--dtype bf16" in next_command(made, PlanSettings(), Path("out"), compare)
    assert "--dtype fp16" in next_command(made, PlanSettings(dtype="fp16"), Path("out"), compare)
    exact = SimpleNamespace(planning=SimpleNamespace(lengths=lengths[:1]))
    assert next_command(exact, None, Path("out"), compare) is None
