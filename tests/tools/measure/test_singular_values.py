"""Singular values of exact attention's weights."""

import pytest
import torch

import subquad as sq
from subquad.tools.measure.peak_memory import peak_extra_mib
from subquad.tools.measure.singular_values import cumulative, heat_map_index, needed, singular_values
from tests.tools.measure.test_utility import inputs


def dense(q, k, scale, visible=None):
    """P written out, for one head."""
    logits = q.double() @ k.double().T * scale
    return (logits if visible is None else logits.masked_fill(~visible, -torch.inf)).softmax(-1)


def test_they_are_those_of_the_weights():
    q, k = inputs(2, 3, 12, 8, size=2.0)
    found = singular_values(q, k, scale=0.4)
    for b in range(2):
        for h in range(3):
            torch.testing.assert_close(found[b][h], torch.linalg.svdvals(dense(q[b, h], k[b, h], 0.4)))


def test_rank_one_has_everything_in_the_first_and_the_identity_equally_much_in_each():
    same = singular_values(torch.randn(1, 1, 6, 4), torch.ones(1, 1, 6, 4))[0]  # all keys alike: P = 1/6 everywhere
    torch.testing.assert_close(cumulative(same), torch.ones(1, 6).double())
    assert needed(same, 0.9).tolist() == [1.0]
    eye = 1e4 * torch.eye(6)[None, None]
    even = singular_values(eye, eye)[0]
    torch.testing.assert_close(cumulative(even), (torch.arange(1, 7) / 6)[None].double())
    assert needed(even, 0.6).tolist() == [4.0]


def test_padding_is_left_out():
    q, k = inputs(2, 2, 9, 8)
    found = singular_values(q, k, mask=sq.Mask.padding([9, 5]))
    torch.testing.assert_close(found[0], singular_values(q[:1], k[:1])[0])
    torch.testing.assert_close(found[1], singular_values(q[1:, :, :5], k[1:, :, :5])[0])
    crossed = singular_values(q, k[:, :, :7], mask=sq.Mask.padding(keys=[3, 7], queries=[9, 4]))
    assert [values.shape for values in crossed] == [(2, 3), (2, 4)]
    q[1, :, 5:], k[1, :, 5:] = 1e6, -1e6
    torch.testing.assert_close(singular_values(q, k, mask=sq.Mask.padding([9, 5]))[1], found[1])


def test_a_causal_mask_and_a_bias_are_applied():
    q, k = inputs(1, 2, 10, 8)
    bias = torch.randn(1, 1, 10, 10)
    causal = singular_values(q, k, mask=sq.Mask.causal())[0]
    biased = singular_values(q, k, bias=bias)[0]
    for h in range(2):
        P = dense(q[0, h], k[0, h], 8**-0.5, torch.ones(10, 10).tril().bool())
        torch.testing.assert_close(causal[h], torch.linalg.svdvals(P))
        P = (q[0, h].double() @ k[0, h].double().T * 8**-0.5 + bias[0, 0]).softmax(-1)
        torch.testing.assert_close(biased[h], torch.linalg.svdvals(P))


def test_grouped_heads_meet_their_key_head():
    q, k = inputs(1, 4, 8, 8)
    found = singular_values(q, k[:, :2])[0]
    torch.testing.assert_close(found, singular_values(q, k[:, :2].repeat_interleave(2, 1))[0])


def test_half_precision_is_read_exactly():
    q, k = (x.bfloat16() for x in inputs(1, 1, 16, 8))
    torch.testing.assert_close(singular_values(q, k)[0], singular_values(q.double(), k.double())[0])


def test_one_matrix_at_a_time_is_in_memory():
    q, k = inputs(1, 16, 256, 8)
    one, _ = peak_extra_mib(lambda: singular_values(q[:, :1], k[:, :1]))
    all_heads, _ = peak_extra_mib(lambda: singular_values(q, k))
    assert all_heads < one + 2.0  # 16 matrices have 8 MiB


def test_the_index_is_the_papers_where_there_are_enough_tokens():
    assert [heat_map_index(n) for n in (2, 64, 512, 4096)] == [1, 16, 128, 128]


def test_packed_segments_are_refused():
    q, k = inputs(1, 1, 8, 4)
    with pytest.raises(ValueError, match="packs segments"):
        singular_values(q, k, mask=sq.Mask.segments([[0] * 4 + [1] * 4]))
