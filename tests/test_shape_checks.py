import pytest
import torch
from jaxtyping import TypeCheckError

from subquad.kernels.attention.softmax import visible_softmax
from tests.shape_checks import sampled

CASES = [f"test_a[{case}]" for case in range(60)]


@pytest.mark.parametrize("case", range(20))
def test_wrong_shapes_are_found_where_shapes_are_checked(case: int, shapes_are_checked: bool):
    logits, visible = torch.zeros(3, 4), torch.ones(4, dtype=torch.int64)  # not a mask
    error = TypeCheckError if shapes_are_checked else RuntimeError
    with pytest.raises(error):
        visible_softmax(logits, visible)


def test_a_test_without_parameters_checks_shapes(shapes_are_checked: bool):
    assert shapes_are_checked


def test_the_first_case_and_some_of_the_others_check_shapes():
    chosen = list(sampled(["test_b", *CASES, "test_c"]))
    assert {"test_b", "test_a[0]", "test_c"} <= set(chosen)
    assert 5 < len(chosen) < 25
    assert chosen == list(sampled(["test_b", *CASES, "test_c"]))


def test_one_of_one_is_every_case():
    assert list(sampled(CASES, one_of=1)) == CASES


def test_whole_runs_are_sampled_with_and_without_parameters():
    runs = [f"tests/research/training/test_a.py::test_{number}" for number in range(60)]
    assert 0 < len(list(sampled(runs))) < 25
    assert "tests/research/training/test_a.py::test_a[0]" in sampled(
        [f"tests/research/training/test_a.py::{case}" for case in CASES]
    )
