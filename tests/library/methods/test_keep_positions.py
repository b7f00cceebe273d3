"""Kept positions against N×N masks that are written down from lists of tokens."""

import pytest
import torch

import subquad as sq
from subquad import Keep, Mask
from subquad.testing.oracle import naive, qkv


@pytest.mark.parametrize(
    "text", ["keep", "keep:first=2,last=3", "keep:every=7", "keep:first=3,sides=columns", "keep:first=0,last"]
)
def test_equals_dense_attention(text: str):
    method, (q, k, v) = sq.parse_method(text), qkv(20)
    for mask in (Mask(), Mask.padding([20, 9]), Mask.causal() & Mask.padding([2, 20]), Mask.window(4)):
        valid = torch.ones(2, 20, dtype=torch.bool) if mask.key_padding(20) is None else mask.key_padding(20)
        allowed = torch.zeros(2, 1, 20, 20, dtype=torch.bool)
        for item, tokens in enumerate(row.nonzero()[:, 0].tolist() for row in valid):
            kept = tokens[: method.first] + tokens[max(0, len(tokens) - method.last) :]
            kept += tokens[:: method.every] if method.every else []
            allowed[item, 0, :, kept] = True
            if method.sides == "both":
                allowed[item, 0, kept] = True
        want = naive(q, k, v, allowed & mask.to_dense(20, 20)) * valid[:, None, :, None]
        torch.testing.assert_close(method(q, k, v, mask=mask), want)


def test_segments_keep_tokens_of_their_own():
    q, k, v = qkv(20, B=1)
    out = sq.attention(q, k, v, method="keep", mask=Mask.segments([[0] * 8 + [1] * 12]))
    for own in (slice(0, 8), slice(8, 20)):
        alone = sq.attention(*(x[:, :, own] for x in (q, k, v)), method="keep")
        torch.testing.assert_close(out[:, :, own], alone)


@pytest.mark.parametrize(("text", "wanted", "method"), [
    ("keep", "keep", Keep(first=1)),
    ("keep:first", "keep", Keep()),
    ("keep:first=4", "keep:first=4", Keep(4)),
    ("keep:last", "keep:last=1", Keep(1, 1)),
    ("keep:first=0,last", "keep:first=0,last=1", Keep(first=0, last=1)),
    ("keep:sides=columns", "keep:sides=columns", Keep(sides="columns")),
])  # fmt: skip
def test_what_is_named_is_kept(text: str, wanted: str, method: Keep):
    assert sq.parse_method(text) == method == sq.parse_method(wanted)
    assert str(method) == wanted


def test_at_least_one_token_is_kept():
    with pytest.raises(ValueError, match="'keep': first=0, last=0 and every=0 keep no token; give one"):
        Keep(first=0)


def test_every_some_th_needs_its_number():
    with pytest.raises(ValueError, match="write settings as keep:setting=value, not 'every'"):
        sq.parse_method("keep:every")


def test_causal_choices_do_not_look_ahead_but_for_the_last():
    assert [Keep(first=1).traits.causal, Keep(every=9).traits.causal, Keep(last=1).traits.causal] == [
        "strict", "strict", "values-only",
    ]  # fmt: skip
    assert [Keep(first=9).traits.subquadratic, Keep(every=9).traits.subquadratic] == [True, False]
