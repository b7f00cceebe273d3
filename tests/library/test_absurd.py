"""No setting hangs or takes memory without end, however absurd beside the length of the input."""

import json

import pytest
import torch

import subquad as sq
from tests.forks import output_of
from tests.library.absurd import ABSURD, TOKENS


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [pytest.param([], id="fastest"), pytest.param(["reference"], id="reference", marks=pytest.mark.long)]
)
def test_absurd_settings_run_or_are_refused_with_both_figures(backend):
    outcomes = dict(map(json.loads, output_of("tests.library.absurd", *backend).splitlines()))
    assert len(outcomes) > 60
    wrong = {
        text: said
        for text, said in outcomes.items()
        if said != "ran" and not (said.startswith("ValueError") and str(ABSURD) in said and "at most" in said)
    }
    assert not wrong


def test_too_many_buckets_are_refused_with_the_length():
    q = torch.randn(1, 1, TOKENS, 8)
    with pytest.raises(ValueError, match="buckets=100000000 for 64 tokens, but it must be at most 1024 there"):
        sq.attention(q, q, q, method="lsh:buckets=100000000")
