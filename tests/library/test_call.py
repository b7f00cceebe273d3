"""Tests of a call's arguments, and of its errors when they do not fit."""

import inspect

import pytest
import torch

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import qkv


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"scale": float("nan")}, ValueError, "scale=nan"),
    ({"scale": "a"}, TypeError, "scale='a', but it must be a number"),
    ({"method": sq.Full().bind(heads=2, head_dim=4)}, TypeError, r"got the bound method full; call it, bound\(query"),
    ({"seed": -1}, ValueError, "seed=-1"),
    ({"seed": 2**63}, ValueError, "seed=9223372036854775808"),
    ({"mask": Mask.causal(offset=torch.tensor([1, 2, 3]))}, ValueError, r"offset is \(3,\)"),
    ({"mask": Mask.causal(offset=2), "is_causal": True}, ValueError, "offset 2 and offset 0"),
])  # fmt: skip
def test_options_that_do_not_fit_are_named(unchecked, options, error, message):
    with pytest.raises(error, match=message):
        sq.attention(*qkv(), **{"method": "full", **options})


@pytest.mark.parametrize("make", [
    lambda: Mask.causal(offset=-1), lambda: Mask.causal(offset=True),
    lambda: Mask.window(-1), lambda: Mask.window(True),
    lambda: Mask.causal(offset=torch.tensor(2.5)), lambda: Mask.causal(offset=torch.tensor(True)),
])  # fmt: skip
def test_offsets_and_windows_are_whole_numbers(make):
    with pytest.raises(ValueError, match="whole number ≥ 0"):
        make()


def test_two_causal_masks_never_widen_each_other():
    with pytest.raises(ValueError, match="offset 0 and offset 2"):
        Mask.causal() & Mask.causal(offset=2)
    both = Mask.causal() & Mask.causal(offset=0)
    assert torch.equal(both.to_dense(5, 5), Mask.causal().to_dense(5, 5))


def test_segments_may_be_lists():
    assert Mask.segments([[0, 0, 1]]).to_dense(3, 3)[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_shared_full_refuses_cross_attention_of_equal_lengths_in_a_layer():
    layer, x = sq.nn.MultiheadAttention(8, 2, method="shared-full"), torch.randn(1, 5, 8)
    assert layer(x).shape == layer(x, x).shape == x.shape
    with pytest.raises(ValueError, match="does not support cross-attention"):
        layer(x, x * 2)


@pytest.mark.parametrize("text", ["clustered clusters=5", "clustered,clusters=5"])
def test_settings_without_a_colon_are_explained(text):
    with pytest.raises(ValueError, match="write settings after a colon, clustered:setting=value"):
        sq.parse_method(text)


def test_a_class_in_place_of_a_method_is_named():
    with pytest.raises(TypeError, match="got the class Clustered; give an instance"):
        inspect.unwrap(sq.methods.resolve)(sq.Clustered)  # without the type checks of the tests
