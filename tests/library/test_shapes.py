import pytest
import torch

from subquad.core.shapes import Sizes, validate

ONE = torch.zeros(1, 1, 1, 1)


def zeros(*shape: int, **kind) -> torch.Tensor:
    return torch.zeros(*shape, **kind)


def test_sizes_of_a_call():
    sizes = validate(zeros(2, 6, 5, 8), zeros(2, 3, 7, 8), zeros(2, 3, 7, 4), enable_gqa=True)
    assert sizes == Sizes(B=2, H=6, G=3, N=5, M=7, D=8, E=4)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        ((2, 3, 5, 8), (4, 3, 5, 8), (4, 3, 5, 8), r"`query` has 2 batch \(B\) but `key` has 4"),
        ((2, 3, 5, 8), (2, 3, 5, 9), (2, 3, 5, 8), "`query` has 8 width but `key` has 9"),
        ((2, 3, 5, 8), (2, 3, 512, 8), (2, 3, 500, 8), "`key` has 512 positions but `value` has 500; they must match"),
        ((2, 3, 5, 8), (2, 3, 5, 8), (1, 3, 5, 8), r"`key` has 2 batch \(B\) but `value` has 1"),
        ((2, 3, 5, 8), (2, 3, 5, 8), (2, 1, 5, 8), "`key` has 3 heads but `value` has 1"),
        ((2, 6, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8), "`query` has 6 heads but `key` has 3.*enable_gqa=True"),
        ((3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8), r"`query` must be \(batch, heads, positions, width\), got 3 axes"),
        ((2, 3, 5, 8), (2, 3, 0, 8), (2, 3, 0, 8), "`key` is empty: its positions axis is 0"),
    ],
)
def test_a_disagreement_names_both_sides(q, k, v, message):
    with pytest.raises(ValueError, match=message):
        validate(zeros(*q), zeros(*k), zeros(*v))


def test_the_message_shows_both_shapes():
    with pytest.raises(ValueError, match=r"\(2, 3, 5, 8\) and \(2, 3, 5, 9\)"):
        validate(zeros(2, 3, 5, 8), zeros(2, 3, 5, 9), zeros(2, 3, 5, 9))


def test_heads_that_do_not_divide_are_refused_even_with_gqa():
    with pytest.raises(ValueError, match="6 heads but `key` has 4; 6 is not a multiple of 4"):
        validate(zeros(1, 6, 5, 8), zeros(1, 4, 5, 8), zeros(1, 4, 5, 8), enable_gqa=True)
    with pytest.raises(ValueError, match=r"6 heads but `key` has 4; they must match$"):
        validate(zeros(1, 6, 5, 8), zeros(1, 4, 5, 8), zeros(1, 4, 5, 8))


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (ONE, ONE.double(), ONE, "`query` is torch.float32 but `key` is torch.float64"),
        (ONE, ONE, ONE.half(), "`query` is torch.float32 but `value` is torch.float16"),
        (ONE.int(), ONE, ONE, "`query` is torch.int32; attention supports float64"),
    ],
)
def test_dtypes_are_named(q, k, v, message):
    with pytest.raises(TypeError, match=message):
        validate(q, k, v)


def test_devices_are_named():
    with pytest.raises(ValueError, match="`query` is on cpu but `value` is on meta"):
        validate(ONE, ONE, ONE.to("meta"))


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match=r"`key` must be a tensor|parameter key="):
        validate(ONE, [[1.0]], ONE)
