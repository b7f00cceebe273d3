"""`sq.compare(…, others=…)`: rows that change the module in another way, in a `with` block."""

import copy
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import subquad as sq
from tests.tools.modules.models import LayerBlock, SdpaBlock, inputs

METHOD = "clustered:clusters=4"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@contextmanager
def scaled_output(module):
    """The module with twice its output, and with its own afterwards."""
    hook = module.register_forward_hook(lambda *call: 2.0 * call[-1] + 1.0)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def failing(module):
    with scaled_output(module):
        raise NotImplementedError("not on\nthis processor")
    yield


@contextmanager
def lasting(module):
    with torch.no_grad():
        next(module.parameters()).mul_(2.0)
    yield


def rows_of(module, **others):
    result = sq.compare(module, inputs(40, 40), methods=METHOD, metric="relative-error", others=others, minutes=3.0)
    return {row["method"]: row for row in result.rows}, result


@pytest.mark.parametrize("block", [SdpaBlock, LayerBlock])
def test_a_row_has_the_figures_of_the_changed_module(block):
    module = nn.Sequential(block(), block())
    weights = copy.deepcopy(module.state_dict())
    rows, result = rows_of(module, math=lambda _: sdpa_kernel(SDPBackend.MATH), scaled=scaled_output)
    x = inputs(40, 40)[0]
    with torch.no_grad():
        exact = module.eval()(x)
        expected = float((2.0 * exact + 1.0 - exact).norm() / exact.norm())
    assert rows["math"]["fidelity"]["40"] == pytest.approx(1.0, abs=1e-5)
    assert rows["scaled"]["fidelity"]["40"] == pytest.approx(1 - expected, abs=0.05)
    assert {rows[name]["status"] for name in ("math", "scaled")} == {"other"}
    assert rows["math"]["model"]["40"]["ms"] > 0
    assert "math and scaled: not subquad's, so it is measured, but never recommended" in str(result)
    for name, value in module.state_dict().items():
        assert torch.equal(value, weights[name])
    assert not module._forward_hooks


def test_they_are_never_recommended():
    _, result = rows_of(SdpaBlock(), same=lambda _: nullcontext())
    chosen = result.to_dict()["recommendation"]
    assert "same" not in {chosen["method"], *chosen["by_length"].values()}


def test_one_that_fails_is_a_row_with_its_error():
    rows, _ = rows_of(SdpaBlock(), broken=failing, fine=lambda _: nullcontext())
    assert rows["broken"]["status"] == "refused"
    assert rows["broken"]["reason"] == "input 0: NotImplementedError: not on this processor"
    assert rows["fine"]["fidelity"]["40"] == pytest.approx(1.0, abs=1e-6)


def test_a_lasting_change_is_an_error():
    with pytest.raises(ValueError, match=r"the row 'lasting' changed the module for good: .*relative error"):
        rows_of(SdpaBlock(), lasting=lasting)


@pytest.mark.parametrize("name", ["full", METHOD, "without attention"])
def test_a_name_of_another_row_is_an_error(name):
    with pytest.raises(ValueError, match=f"others has a row '{name}', but that is the name of another row"):
        rows_of(SdpaBlock(), **{name: lambda _: nullcontext()})
