"""A length at which the time did not suffice for anything, in the report."""

from subquad.tools.plan.report import headline
from subquad.tools.plan.tables import tried
from subquad.tools.runs.floor import Floor

EXACT = {"length": 512, "layers": {}, "rounds": [], "floors": [], "passages": 0, "tried": 16}
UNDECIDED = {
    "length": 4096,
    "layers": {},
    "rounds": [],
    "floors": [],
    "passages": 0,
    "tried": 0,
    "least_seconds": 412.0,
}
VERIFIED = EXACT | {
    "length": 2048,
    "passages": 2,
    "verified": {"predicted": 0.004, "loss": 0.004, "bound": 0.006, "speedup": 1.5, "passages": 3},
}


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
    report = {"lengths": [VERIFIED, UNDECIDED]}
    assert tried(report) == [
        "2,048 tokens: 16 candidates were tried on 2 passages, and the plan was verified on 3 held-out passages.",
        "4,096 tokens: nothing was decided, which takes about 412 seconds at least.",
    ]
