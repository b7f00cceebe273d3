from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import subquad as sq
from subquad import Mask
from subquad.core.shapes import Sizes

CPU = torch.device("cpu")


def sizes(N: int, M: int | None = None, B: int = 2, H: int = 2) -> Sizes:
    return Sizes(B, H, H, N, N if M is None else M, 8, 8)


def table(mask: Mask, N: int, M: int | None = None) -> list[list[int]]:
    return mask.to_dense(N, N if M is None else M)[0, 0].int().tolist()


# ---------------------------------------------------------------- what each one says


def test_causal():
    assert table(Mask.causal(), 3) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_causal_with_an_offset():
    assert table(Mask.causal(offset=2), 2, 4) == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_causal_with_an_offset_for_each_item():
    dense = Mask.causal(offset=torch.tensor([0, 2])).to_dense(1, 4)
    assert dense[:, 0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]


def test_window_reaches_to_both_sides():
    assert table(Mask.window(1), 4) == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]


def test_a_causal_window_reaches_back():
    assert table(Mask.causal() & Mask.window(1), 3) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_padding_hides_both_sides():
    assert table(Mask.padding([2, 3]), 3) == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]


def test_padding_of_keys_hides_keys_only():
    assert table(Mask.padding(keys=[2]), 2, 3) == [[1, 1, 0], [1, 1, 0]]


def test_padding_of_queries_hides_queries_only():
    assert table(Mask.padding(queries=[1]), 2, 3) == [[1, 1, 1], [0, 0, 0]]


def test_segments_see_their_own_and_negative_ids_are_padding():
    assert table(Mask.segments(torch.tensor([[5, 0, 5, -1]])), 4) == [
        [1, 0, 1, 0],
        [0, 1, 0, 0],
        [1, 0, 1, 0],
        [0, 0, 0, 0],
    ]


def test_dense_is_itself():
    allowed = torch.tensor([[True, False], [False, True]]).view(1, 1, 2, 2)
    assert torch.equal(Mask.dense(allowed).to_dense(2, 2), allowed)


def test_no_mask_hides_nothing():
    assert Mask().to_dense(2, 3).all()
    assert Mask().visible(2, 3, CPU) is None
    assert Mask().key_padding(3) is None
    assert Mask().query_padding(2) is None


# ---------------------------------------------------------------- together


@st.composite
def makers(draw) -> Callable[[], Mask]:
    """A function that makes a mask in the test, because the run-time type checks draw random numbers of their own."""
    bits = st.lists(st.booleans(), min_size=5, max_size=5)
    rows = torch.tensor(draw(st.lists(bits, min_size=5, max_size=5)))
    ids = draw(st.lists(st.integers(-1, 2), min_size=5, max_size=5))
    width, length = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    valid = torch.tensor([draw(bits)])
    kinds = [
        lambda: Mask(),
        lambda: Mask.causal(),
        lambda: Mask.window(width),
        lambda: Mask.padding([length]),
        lambda: Mask.padding(keys=valid),
        lambda: Mask.padding(queries=valid),
        lambda: Mask.segments(torch.tensor([ids])),
        lambda: Mask.dense(rows.view(1, 1, 5, 5)),
    ]
    return draw(st.sampled_from(kinds))


@given(makers(), makers(), makers())
@settings(deadline=None)
def test_and_is_the_intersection(a, b, c):
    a, b, c = a(), b(), c()
    dense = [mask.to_dense(5, 5) for mask in (a, b, c)]
    assert torch.equal((a & b & c).to_dense(5, 5), dense[0] & dense[1] & dense[2])


@given(makers(), makers())
@settings(deadline=None)
def test_visible_and_query_padding_make_up_the_whole(a, b):
    mask = a() & b()
    visible, valid = mask.visible(5, 5, CPU), mask.query_padding(5)
    whole = torch.ones(1, 1, 5, 5, dtype=torch.bool) if visible is None else visible
    whole = whole if valid is None else whole & valid[:, None, :, None]
    assert torch.equal(whole.expand(1, 1, 5, 5), mask.to_dense(5, 5))


@given(makers(), makers())
@settings(deadline=None)
def test_only_padding_never_becomes_a_table(a, b):
    mask = a() & b()
    visible = mask.visible(5, 5, CPU)
    if mask.only_padding:
        assert visible is None or visible.shape[2] == 1
    else:
        assert visible.shape[2] == 5


def test_only_causal_is_the_plain_causal_mask():
    assert Mask.causal().only_causal
    assert Mask.causal(offset=0).only_causal
    assert (Mask.causal() & Mask.padding(queries=[3])).only_causal  # says nothing more about the keys
    others = (Mask(), Mask.causal(offset=1), Mask.causal(offset=torch.tensor(0)), Mask.causal() & Mask.window(2))
    assert not any(mask.only_causal for mask in (*others, Mask.causal() & Mask.padding([3])))


def test_queries_behind_all_keys_need_no_pattern():
    for N, M, offset in ((1, 5, 4), (3, 5, 9)):
        assert Mask.causal(offset=offset).visible(N, M, torch.device("cpu")) is None
        assert Mask.causal(offset=offset).to_dense(N, M).all()
    assert Mask.causal(offset=3).visible(1, 5, torch.device("cpu")) is not None


def test_offsets_agree_or_raise():
    assert (Mask.causal(offset=2) & Mask.window(1)).offset == 2
    assert (Mask.causal(offset=2) & Mask.causal(offset=2)).offset == 2
    with pytest.raises(ValueError, match="offset 2 and offset 3"):
        Mask.causal(offset=2) & Mask.causal(offset=3)


def test_the_narrower_window_wins():
    assert (Mask.window(5) & Mask.window(2) & Mask()).span == 2


def test_and_takes_masks_only(unchecked):
    with pytest.raises(TypeError, match="unsupported operand"):
        Mask.causal() & torch.ones(2)


def test_masks_cannot_be_changed():
    with pytest.raises(AttributeError):
        Mask.causal().span = 3


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Mask(), "Mask()"),
        (Mask.causal(offset=3) & Mask.window(2), "Mask.causal(offset=3) & Mask.window(2)"),
        (Mask.padding(keys=[3], queries=[2]), "Mask.padding(keys=…, queries=…)"),
        (Mask.padding([3]) & Mask.segments(torch.zeros(1, 3).long()), "Mask.padding(…) & Mask.segments(…)"),
    ],
)
def test_repr_reads_as_it_is_written(mask, text):
    assert repr(mask) == text


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask.padding(), r"needs lengths \(B,\) or a bool"),
        (lambda: Mask.padding([3], keys=[3]), "not a mixture"),
        (lambda: Mask.padding(torch.tensor([0.5])), "got torch.float32"),
        (lambda: Mask.padding(torch.tensor([True])), "got torch.bool"),
        (lambda: Mask.padding(torch.tensor([[1, 0]])), "got torch.int64"),
        (lambda: Mask.segments(torch.tensor([0, 1])), r"int tensor \(B, N\), got torch.int64 \(2,\)"),
        (lambda: Mask.segments(torch.zeros(1, 2)), "got torch.float32"),
        (lambda: Mask.window(-1), "must be a whole number ≥ 0"),
        (lambda: Mask.dense(torch.ones(1, 1, 2, 2)), "got torch.float32"),
        (lambda: Mask.dense(torch.ones(2, 2, dtype=torch.bool)), r"got torch.bool \(2, 2\)"),
    ],
)
def test_makers_refuse_nonsense(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "N", "M", "message"),
    [
        (Mask.padding([3, 3]), 4, 5, "4 queries and 5 keys; use Mask.padding"),
        (Mask.segments(torch.zeros(2, 4).long()), 4, 5, "segments, but there are 4 queries and 5 keys"),
        (Mask.causal(), 4, 5, r"over 4 queries and 5 keys .*Mask.causal\(offset=1\)"),
        (Mask.window(2), 1, 5, r"over 1 queries and 5 keys .*Mask.causal\(offset=4\)"),
        (Mask.padding([3]), 4, 4, "padding is for a batch of 1, but the batch is 2"),
        (Mask.padding([3, 5]), 4, 4, "a length of 5, but there are 4 positions"),
        (Mask.padding([3, -1]), 4, 4, "a length of -1, but there are 4 positions"),
        (Mask.padding(keys=torch.ones(2, 4).bool()), 4, 5, "padding of the keys has 4 positions, but there are 5"),
        (
            Mask.padding(queries=torch.ones(2, 3).bool()),
            4,
            5,
            "padding of the queries has 3 positions, but there are 4",
        ),
        (Mask.segments(torch.zeros(2, 3).long()), 4, 4, "segment ids have 3 positions, but there are 4"),
        (Mask.dense(torch.ones(1, 3, 4, 4).bool()), 4, 4, r"\(1, 3, 4, 4\) but attention is \(2, 2, 4, 4\)"),
        (Mask.dense(torch.ones(1, 1, 1, 4).bool()), 4, 4, r"\(1, 1, 1, 4\) but attention is \(2, 2, 4, 4\)"),
        (Mask.padding(torch.ones(2, 4, device="meta").bool()), 4, 4, "is on meta but `query` is on cpu"),
    ],
)
def test_check_names_both_sides(mask, N, M, message):
    with pytest.raises(ValueError, match=message):
        mask.check(sizes(N, M), CPU)


@pytest.mark.parametrize(
    "mask",
    [Mask.padding([4, 0]), Mask.causal(offset=1), Mask.window(9), Mask.dense(torch.ones(1, 2, 4, 4).bool())],
    ids=repr,
)
def test_check_lets_good_masks_pass(mask):
    assert mask.check(sizes(4), CPU) is None


def test_is_causal_is_the_mask():
    q, k, v = torch.randn(3, 1, 1, 4, 2)
    out = sq.attention(q, k, v, method="full", is_causal=True)
    assert torch.equal(out, sq.attention(q, k, v, method="full", mask=Mask.causal()))
    padded = sq.attention(q, k, v, method="full", is_causal=True, mask=Mask.padding([3]))
    torch.testing.assert_close(padded[:, :, :3], out[:, :, :3])


def test_is_causal_means_offset_0_and_never_widens():
    q, k, v = torch.randn(3, 1, 1, 4, 2)
    want = sq.attention(q, k, v, method="full", is_causal=True)
    torch.testing.assert_close(sq.attention(q, k, v, method="full", is_causal=True, mask=Mask.causal()), want)
    with pytest.raises(ValueError, match="offset 3 and offset 0"):
        sq.attention(q[:, :, 3:], k, v, method="full", is_causal=True, mask=Mask.causal(offset=3))


def test_tensors_stay_where_they_are_under_another_default_device():
    ids, lengths, ends = torch.tensor([[0, 0, 1]]), torch.tensor([2]), torch.tensor([0, 2, 3])
    valid = torch.tensor([[True, True, False]])
    with torch.device("meta"):
        masks = [
            Mask.segments(ids),
            Mask.padding(lengths),
            Mask.padding(keys=valid, queries=lengths),
            Mask.from_cu_seqlens(ends),
            Mask.from_sdpa(valid[:, None, None]),
        ]
        for mask in masks:
            mask.check(sizes(3, B=1), CPU)
            assert mask.to_dense(3, 3).device == CPU
