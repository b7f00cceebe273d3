"""Tests of what mask functions of transformers show, against the masks that transformers makes of them."""

import math

import pytest
import torch
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.models.gemma3.modeling_gemma3 import _bidirectional_window_overlay

import subquad as sq
from subquad.hf.patterns import CAUSAL, EVERYTHING, LayerPattern, read_pattern

SEGMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
KNOWN = {
    "causal": causal_mask_function,
    "bidirectional": bidirectional_mask_function,
    "causal window": sliding_window_causal_mask_function(3),
    "bidirectional window": sliding_window_bidirectional_mask_function(2),
    "causal or everything": or_masks(causal_mask_function, lambda *args: torch.tensor(True)),
    "Gemma's window": or_masks(sliding_window_causal_mask_function(3), _bidirectional_window_overlay(3)),
    "windows of two sizes": and_masks(sliding_window_causal_mask_function(3), sliding_window_overlay(2)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_pattern_shows_what_transformers_mask_shows(name):
    pattern = read_pattern(KNOWN[name])
    mask = sq.Mask.causal() if pattern.causal else sq.Mask()
    mask = mask if pattern.window is None else mask & sq.Mask.window(pattern.window)
    want = sdpa_mask(1, 9, 9, mask_function=KNOWN[name], allow_is_causal_skip=False, use_vmap="or" in name)
    assert torch.equal(mask.to_dense(9, 9), want.expand(1, 1, 9, 9))


def test_packing_leaves_the_pattern_as_it_is():
    window = sliding_window_causal_mask_function(3)
    packed = [and_masks(window, packed_sequence_mask_function(SEGMENTS))]
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):  # from transformers 5.23 on
        packed.append(masking_utils.packed_sequence_compatibility_function(window, POSITIONS, SEGMENTS))
    assert all(read_pattern(function) == LayerPattern(-2, 0) for function in packed)
    assert read_pattern(None) == EVERYTHING
    assert CAUSAL.window is None
    assert LayerPattern(-math.inf, 0) == CAUSAL


NOT_UNDERSTOOD = [
    (chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)), "chunked_overlay"),
    (and_masks(causal_mask_function, lambda b, h, q, k: q != k), "lambda"),
    (or_masks(sliding_window_causal_mask_function(2), lambda *args: torch.tensor(False)), "lambda"),
]
if hasattr(masking_utils, "blockwise_overlay"):  # older versions of transformers do not have it
    overlay = masking_utils.blockwise_overlay(SEGMENTS)
    NOT_UNDERSTOOD.append((or_masks(causal_mask_function, overlay), "blockwise_overlay"))


@pytest.mark.parametrize(("function", "name"), NOT_UNDERSTOOD)
def test_a_function_that_is_not_understood_is_named(function, name):
    with pytest.raises(ValueError, match=f"masks attention by .*{name}.*, which subquad does not support"):
        read_pattern(function)


def test_a_window_to_one_side_is_refused():
    with pytest.raises(ValueError, match="distances -2 to inf"):
        read_pattern(sliding_window_overlay(3))
