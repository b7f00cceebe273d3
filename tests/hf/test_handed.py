"""The mask that is handed through transformers: what is encoded is what is decoded."""

import pytest
import torch

from subquad.hf.handed import decode, encode

REAL = torch.tensor([[True, True, True, False], [True, True, True, True]])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("real", [REAL, None])
def test_padding_comes_back(causal, real):
    given = encode(causal=causal, real=real, filled=None, segments=None, batch=2)
    assert given.ndim == 4
    assert given.numel() <= 8  # never N×M
    handed = decode(given, 4, 4, causal=not causal, label="0")
    assert handed.causal == causal
    assert (handed.real is None) == (real is None)
    assert real is None or torch.equal(handed.real, real)
    assert handed.offset == 0


def test_segments_and_slots_come_back():
    segments = torch.tensor([[1, 1, 2, 2]])
    packed = decode(
        encode(causal=True, real=None, filled=None, segments=segments, batch=1), 4, 4, causal=False, label=""
    )
    assert packed.causal
    assert torch.equal(packed.segments, segments - 1)
    filled = torch.tensor([True, True, True, False, False, False])
    real = torch.tensor([[False, True, True, False, False, False]])
    static = decode(encode(causal=True, real=real, filled=filled, segments=None, batch=1), 2, 6, causal=False, label="")
    assert static.offset == 1
    assert torch.equal(static.real, real)
    assert torch.equal(static.queries(2), torch.tensor([[True, True]]))


def test_a_step_on_a_growing_cache_stands_at_its_end():
    handed = decode(encode(causal=True, real=REAL, filled=None, segments=None, batch=2), 1, 4, causal=False, label="")
    assert handed.offset == 3
    assert torch.equal(handed.queries(1), torch.tensor([[False], [True]]))


@pytest.mark.parametrize("causal", [True, False])
def test_without_a_mask_the_layer_says_whether_it_is_causal(causal):
    assert decode(None, 4, 4, causal=causal, label="0").causal == causal


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -torch.inf, -1e4])
def test_additive_padding_of_a_models_own_is_read(least):
    bias = torch.where(REAL, 0.0, least)[:, None, None]
    assert torch.equal(decode(bias, 4, 4, causal=True, label="0").real, REAL)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(2, 4), r"shape \(2, 4\)"),
        (torch.ones(2, 1, 4, 4, dtype=torch.bool), "N×M memory"),
        (torch.ones(2, 4, 1, 4, dtype=torch.bool), "N×M memory"),
        (torch.ones(2, 1, 1, 3, dtype=torch.bool), "3 positions, but there are 4 keys"),
        (torch.ones(2, 1, 1, 4, dtype=torch.int64), "dtype torch.int64"),
        (torch.full((2, 1, 1, 4), -0.5), "values other than 0 and less than -10000"),
    ],
)
def test_what_is_not_padding_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        decode(given, 4, 4, causal=True, label="0 (attn)")
