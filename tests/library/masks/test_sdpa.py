"""`Mask.from_sdpa`: the mask that SDPA was given, or an error."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import subquad as sq
from subquad import Mask
from subquad.testing.oracle import normal, qkv

SIZES = st.integers(1, 6)


@st.composite
def patterns(draw) -> torch.Tensor:
    """A bool (b,1,N,M) that a `Mask` says: padding of the keys or of both sides, causality, a window, or these."""
    N, batch = draw(SIZES), draw(st.integers(1, 2))
    kind = draw(st.sampled_from(["none", "causal", "window", "causal window", "end"]))
    M = N + draw(st.integers(0, 3)) if kind in ("none", "end") else N
    valid = torch.tensor([[draw(st.booleans()) for _ in range(M)] for _ in range(batch)])
    width = draw(st.integers(0, 6))
    ahead = torch.arange(M) - torch.arange(N)[:, None]
    seen = {
        "none": torch.ones(N, M, dtype=torch.bool),
        "causal": ahead <= 0,
        "window": ahead.abs() <= width,
        "causal window": (ahead <= 0) & (ahead >= -width),
        "end": ahead <= M - N,
    }[kind]
    queries = valid[:, :, None] if N == M and draw(st.booleans()) else True
    return (valid[:, None] & seen & queries)[:, None]


@given(patterns())
@settings(deadline=None, max_examples=300)
def test_every_pattern_comes_back_as_it_was(allowed):
    N, M = allowed.shape[2:]
    for attn_mask in (allowed, torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf)):
        mask = Mask.from_sdpa(attn_mask)
        assert not mask.allowed
        assert torch.equal(mask.to_dense(N, M).expand(allowed.shape), allowed)


@given(patterns(), st.data())
@settings(deadline=None, max_examples=300)
def test_a_mask_is_itself_or_refused(allowed, data):
    allowed = allowed.clone()
    for _ in range(data.draw(st.integers(0, 3))):
        at = [data.draw(st.integers(0, size - 1)) for size in allowed.shape]
        allowed[tuple(at)] ^= True
    N, M = allowed.shape[2:]
    try:
        mask = Mask.from_sdpa(allowed)
    except ValueError as error:
        assert "is not padding, causal, a window" in str(error)  # noqa: PT017
    else:
        assert torch.equal(mask.to_dense(N, M).expand(allowed.shape), allowed)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
@settings(deadline=None, max_examples=300)
def test_random_bits_are_themselves_or_refused(N, M, data):
    bits = torch.tensor([data.draw(st.booleans()) for _ in range(N * M)]).view(N, M)
    try:
        mask = Mask.from_sdpa(bits)
    except ValueError:
        return
    assert torch.equal(mask.to_dense(N, M)[0, 0], bits)


REAL = torch.tensor([[True] * 4 + [False], [False, True, True, True, True]])
BOTH = REAL[:, None, :, None] & REAL[:, None, None, :]


@pytest.mark.parametrize("hidden", [None, -math.inf, torch.finfo(torch.float32).min, -10_000.0])
@pytest.mark.parametrize("pattern", ["", "causal", "window"])
def test_an_outer_product_is_padding_of_both_sides(hidden, pattern):
    kind = {"": Mask(), "causal": Mask.causal(), "window": Mask.window(1)}[pattern]
    allowed = BOTH & kind.to_dense(5, 5)
    mask = Mask.from_sdpa(allowed if hidden is None else torch.zeros(allowed.shape).masked_fill(~allowed, hidden))
    assert (mask.is_causal, mask.span) == (kind.is_causal, kind.span)
    assert torch.equal(mask.query_padding(5) & allowed.any(3)[:, 0], allowed.any(3)[:, 0])
    assert torch.equal(mask.to_dense(5, 5), allowed)


def test_an_outer_product_of_cross_attention_is_padding_of_both_sides():
    queries, keys = torch.tensor([[True, False, True]]), torch.tensor([[False, True, True, False]])
    mask = Mask.from_sdpa(queries[:, None, :, None] & keys[:, None, None, :])
    assert torch.equal(mask.query_padding(3), queries)
    assert torch.equal(mask.key_padding(4), keys)


def test_a_query_that_hides_all_keys_with_finite_numbers_is_padding_if_its_key_is_hidden_too():
    with pytest.raises(ValueError, match="hides all keys of a query with finite numbers"):
        Mask.from_sdpa(torch.tensor([[0.0, 0.0], [-1e9, -1e9]]))
    assert Mask.from_sdpa(torch.tensor([[0.0, -1e9], [-1e9, -1e9]])).only_padding


def test_a_mask_over_keys_is_padding_of_their_size():
    valid = torch.tensor([[True, True, False], [True, False, False]])
    for attn_mask in (valid[:, None, None], valid[:, None, None].expand(2, 4, 5, 3)):
        mask = Mask.from_sdpa(attn_mask)
        assert torch.equal(mask.key_padding(3), valid)
        assert mask.only_padding
        assert mask.keys[0].numel() == 6
    alike = Mask.from_sdpa(valid[1:, None, None].expand(3, 4, 5, 3))
    assert torch.equal(alike.key_padding(3), valid[1:].expand(3, 3))


def test_nothing_hidden_is_no_mask():
    for attn_mask in (None, torch.ones(3, 5).bool(), torch.zeros(2, 1, 1, 5)):
        assert repr(Mask.from_sdpa(attn_mask)) == "Mask()"


def test_is_causal_stands_at_the_first_key_as_in_sdpa():
    q, k, v = qkv(4, 7)
    mask = Mask.from_sdpa(None, True)
    assert mask.offset == 0
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(sq.attention(q, k, v, method="full", mask=mask), want)


@pytest.mark.parametrize(
    ("attn_mask", "text"),
    [
        (torch.ones(5, 5).tril().bool(), "Mask.causal()"),
        (torch.ones(3, 5).tril(2).bool(), "Mask.causal(offset=2)"),
        (torch.ones(3, 5).tril().bool(), "Mask.causal(offset=0)"),
        (torch.ones(5, 5).tril(1).triu(-1).bool(), "Mask.window(1)"),
        (torch.ones(5, 5).tril().triu(-2).bool(), "Mask.causal() & Mask.window(2)"),
        (torch.eye(2, 4).bool(), "Mask.causal(offset=0) & Mask.window(0)"),
    ],
)
def test_patterns_are_named(attn_mask, text):
    assert repr(Mask.from_sdpa(attn_mask)) == text


def test_a_batch_of_one_stands_for_all_items():
    mask = Mask.from_sdpa(torch.tensor([[True, True, False]]), batch=4)
    assert mask.key_padding(3).shape == (4, 3)
    with pytest.raises(ValueError, match="for a batch of 2, but the batch is 3"):
        Mask.from_sdpa(torch.tensor([[True, False], [True, True]])[:, None, None], batch=3)


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min, -10_000.0])
def test_large_negative_numbers_hide_where_another_key_is_seen(hidden):
    q, k, v = qkv(5, 5)
    attn_mask = torch.zeros(2, 1, 1, 5)
    attn_mask[1, ..., 3:] = hidden
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
    torch.testing.assert_close(sq.attention(q, k, v, method="full", mask=Mask.from_sdpa(attn_mask)), want)


@pytest.mark.parametrize(
    ("attn_mask", "kind", "message"),
    [
        (torch.full((1, 1, 1, 3), -1e9), ValueError, "hides all keys of a query with finite numbers"),
        (torch.tensor([[0.0, -5.0]]), ValueError, "contains other numbers than 0 and −inf"),
        (torch.tensor([[0.0, math.nan]]), ValueError, "contains other numbers than 0 and −inf"),
        (torch.ones(2, 3, dtype=torch.int64), TypeError, "torch.int64, but SDPA accepts bool"),
        ([[True]], TypeError, "is a list"),
        (torch.ones(3).bool(), ValueError, r"\(3,\), but it must broadcast"),
        (torch.ones(1, 0).bool(), ValueError, "empty"),
        (torch.tensor([[True], [False]]).view(1, 2, 1, 1), ValueError, "differs between heads"),
        (torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 1]]).bool(), ValueError, "is not padding, causal"),
        (torch.ones(4, 3, 3, device="meta").bool(), ValueError, "cannot be read here"),
        (torch.zeros(3, 3, requires_grad=True), ValueError, "requires a gradient, so it is a bias"),
        (torch.tensor([[True], [False]]), ValueError, r"\(2, 1\) has one column, which may represent all keys"),
    ],
)
def test_what_is_no_such_mask_is_refused(unchecked, attn_mask, kind, message):
    with pytest.raises(kind, match=message):
        Mask.from_sdpa(attn_mask)


def test_two_masks_are_refused_as_in_sdpa():
    with pytest.raises(ValueError, match="both attn_mask and is_causal=True"):
        Mask.from_sdpa(torch.ones(2, 2).bool(), True)


def test_heads_that_are_alike_are_one():
    allowed = torch.ones(5, 5).tril().bool()
    assert repr(Mask.from_sdpa(allowed.repeat(2, 3, 1, 1))) == "Mask.causal()"


def test_sq_attention_says_what_to_do_with_an_attn_mask():
    with pytest.raises(TypeError, match=r"does not accept attn_mask: give mask=sq.Mask.from_sdpa\(attn_mask\)"):
        sq.attention(*qkv(), method="full", attn_mask=torch.ones(24, 24).bool())


# ---------------------------------------------------------------- cu_seqlens


def test_cu_seqlens_are_segments():
    q, k, v = qkv(9, 9, B=1)
    packed = sq.attention(q, k, v, method="full", mask=Mask.from_cu_seqlens(torch.tensor([0, 4, 4, 7]), tokens=9))
    for start, end in ((0, 4), (4, 7)):
        part = slice(start, end)
        want = F.scaled_dot_product_attention(q[:, :, part], k[:, :, part], v[:, :, part])
        torch.testing.assert_close(packed[:, :, part], want)
    assert not packed[:, :, 7:].any()
    assert Mask.from_cu_seqlens([0, 3]).ids[0].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("cu_seqlens", "tokens", "message"),
    [
        ([1, 3], None, "must start with 0"),
        ([0, 3, 2], None, "never fall"),
        (torch.tensor([0, 3, 2], dtype=torch.uint8), None, "never fall"),
        ([0, 3], 2, "ends at 3, but there are 2 tokens"),
        ([0], None, r"int \(sequences \+ 1,\), got torch.int64 \(1,\)"),
        ([0.0, 2.0], None, "got torch.float32"),
        ([[0, 2]], None, r"got torch.int64 \(1, 2\)"),
    ],
)
def test_other_lists_are_no_cu_seqlens(unchecked, cu_seqlens, tokens, message):
    with pytest.raises(ValueError, match=message):
        Mask.from_cu_seqlens(cu_seqlens, tokens)


# ---------------------------------------------------------------- nested tensors


def jagged(lengths, width=8, heads=2, seed=0, layout=torch.jagged):
    items = [torch.randn(n, heads, width, generator=torch.Generator().manual_seed(seed + n)) for n in lengths]
    return torch.nested.nested_tensor(items, layout=layout, requires_grad=True).transpose(1, 2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nested_tensors_are_one_call_for_each_item(layout, is_causal):
    lengths = (5, 3, 7)
    q, k, v = (jagged(lengths, seed=seed, layout=layout) for seed in (0, 100, 200))
    out = sq.attention(q, k, v, method="full", is_causal=is_causal)
    assert out.is_nested
    assert out.layout == layout
    for got, *inputs in zip(*(x.transpose(1, 2).unbind() for x in (out, q, k, v)), strict=True):
        one = [x.transpose(0, 1)[None] for x in inputs]
        want = F.scaled_dot_product_attention(*one, is_causal=is_causal)
        torch.testing.assert_close(got.transpose(0, 1)[None], want)


def test_nested_outputs_go_with_nested_inputs_and_have_gradients():
    x = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (5, 3)], layout=torch.jagged, requires_grad=True)
    heads = x.transpose(1, 2)
    out = sq.attention(heads, heads, heads, method="clustered:clusters=2")
    (out + heads).values().square().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.values().abs().sum(-1).all())


def test_nested_tensors_across():
    q, k = jagged((5, 3)), jagged((2, 6), seed=50)
    v = k * 2
    out = sq.attention(q, k, v, method="full").transpose(1, 2).unbind()
    first = [x.transpose(1, 2).unbind()[0].transpose(0, 1)[None] for x in (q, k, v)]
    torch.testing.assert_close(out[0].transpose(0, 1)[None], F.scaled_dot_product_attention(*first))


def test_what_does_not_go_with_nested_tensors_is_refused():
    q = jagged((5, 3))
    for options in ({"keep": [0]}, {"return_lse": True}, {"bias": torch.zeros(2, 2, 5, 5)}):
        with pytest.raises((ValueError, TypeError), match=next(iter(options))):
            sq.attention(q, q, q, method="full", **options)
    with pytest.raises((ValueError, TypeError), match=r"`key` is not nested but others are|parameter '?value"):
        sq.attention(q, torch.zeros(2, 2, 5, 8), q, method="full")


@pytest.mark.usefixtures("unchecked")
def test_nested_tensors_made_of_heads_first():
    items = [[normal(2, n, 8, seed=n + seed) for n in (5, 3)] for seed in (0, 100, 200)]
    out = sq.attention(*(torch.nested.nested_tensor(each, layout=torch.strided) for each in items), method="full")
    for got, q, k, v in zip(out.unbind(), *items, strict=True):
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q[None], k[None], v[None])[0])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_keys_and_values_have_the_same_lengths(layout):
    q, k, v = (jagged(lengths, layout=layout) for lengths in ((5, 3), (5, 3), (3, 5)))
    with pytest.raises(ValueError, match="`key` has items of 5, 3 tokens but `value` has items of 3, 5"):
        sq.attention(q, k, v, method="full")


@pytest.mark.usefixtures("unchecked")
def test_nested_items_that_differ_in_more_than_their_tokens_are_refused():
    tokens_first = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (5, 3)], layout=torch.strided)
    with pytest.raises(ValueError, match=r"but there are \(2, 5, 8\) and \(2, 3, 8\)"):
        sq.attention(tokens_first, tokens_first, tokens_first, method="full")
    widths = torch.nested.nested_tensor([torch.randn(9, 12), torch.randn(5, 11)], layout=torch.strided)
    with pytest.raises(ValueError, match=r"but there are \(9, 12\) and \(5, 11\)"):
        sq.nn.MultiheadAttention(12, 4)(widths)
