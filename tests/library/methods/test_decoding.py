"""Decoding for long: what goes wrong only after thousands of steps."""

import inspect
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import subquad as sq
from subquad.methods.core.recurrence import check_state
from subquad.testing.oracle import qkv
from tests.forks import output_of

METHODS = ("linear", "performer:features=64", "rfa:features=32", "linformer:k=16")
STEPS = 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.long if i else []) for i, name in enumerate(METHODS)]
)
def test_ten_thousand_steps_equal_the_causal_call(method: str):
    result = json.loads(output_of("tests.library.methods.decoded", method))
    assert result["dtypes"] == ["torch.float32"]
    assert result["error"] <= 1e-5


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_a_step_after_ten_thousand_tokens_costs_what_the_second_does(method: str):
    q, k, v = qkv(STEPS + 1, B=1, H=4, G=2)
    bound = sq.parse_method(method).bind(heads=4, kv_heads=2, head_dim=8, max_length=STEPS + 1).eval()
    work, sizes = [], []
    for past in (1, STEPS):
        _, state = bound.step(*(x[:, :, :past] for x in (q, k, v)), bound.init_state(1, like=q, value_dim=6))
        with FlopCounterMode(display=False) as counter:
            bound.step(*(x[:, :, past : past + 1] for x in (q, k, v)), state)
        work.append(counter.get_total_flops())
        sizes.append(sum(tensor.numel() for tensor in state.values()))
    assert work[0] == work[1] > 0
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("given", [None, (torch.ones(2, 3),), {"sums": 0.0}], ids=["none", "tuple", "numbers"])
def test_a_state_that_is_no_dict_of_tensors_is_told_where_it_comes_from(given):
    with pytest.raises(
        TypeError, match=r"`state` is a .*, but it must be a dict of tensors: init_state makes the first"
    ):
        inspect.unwrap(check_state)(given, {}, torch.ones(2, 1, 1, 1), "2 heads", "linear", None)
