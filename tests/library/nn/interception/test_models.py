"""Models of other libraries under `sq.intercept`: what it replaces is what the docs say."""

from pathlib import Path

import pytest
import torch

import subquad as sq
from tests.library.nn.interception.models import MODELS, made

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "any-model.md"
METHOD = "smyrf:clusters=2"
each_model = pytest.mark.parametrize("name", MODELS)


@each_model
def test_full_equals_the_models_own_attention(name):
    model, run = made(name)
    with torch.inference_mode():
        want = run(model)
        with sq.intercept("full", strict=True) as seen:
            got = run(model)
    assert seen.replaced > 0
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@each_model
def test_the_docs_say_what_the_method_replaces(name):
    model, run = made(name)
    with torch.inference_mode():
        want = run(model)
        with sq.intercept(METHOD) as seen:
            got = run(model)
    assert torch.equal(got, want) == (seen.replaced == 0)
    reasons = {row.reason.partition(":")[0] for row in seen.calls if row.reason is not None}
    row = f"| {name} | {seen.replaced} | {seen.exact} | {'; '.join(sorted(reasons))} |"
    assert row in PAGE.read_text("utf-8").splitlines()
