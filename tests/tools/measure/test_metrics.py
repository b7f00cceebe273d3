"""The named metrics, and which tensor of an output they read."""

import math
from dataclasses import dataclass

import pytest
import torch
from transformers.modeling_outputs import MaskedLMOutput

from subquad.tools.measure.metrics import METRICS, first_tensor


def test_cosine_is_the_mean_over_rows():
    a = torch.tensor([[[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]])
    b = torch.tensor([[[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]])
    assert METRICS["cosine"](a, b) == pytest.approx((math.sqrt(0.5) + 1.0 + 1.0) / 3)  # rows of zeros are the same


def test_cosine_of_a_row_of_zeros_to_another_row_is_zero():
    assert METRICS["cosine"](torch.zeros(1, 2), torch.ones(1, 2)) == 0.0


def test_relative_error_is_one_less_it():
    assert METRICS["relative-error"](torch.tensor([3.0, 3.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.8)


def test_kl_is_the_exponential_of_the_mean_divergence():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    kl = (0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)) / 2
    assert METRICS["kl"](q.log(), p.log()) == pytest.approx(math.exp(-kl))


def test_kl_skips_classes_that_the_exact_output_excludes():
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    assert METRICS["kl"](logits, logits) == pytest.approx(1.0)


def test_kl_reads_the_logits_by_name():
    hidden, logits = torch.randn(1, 4, 8), torch.randn(1, 4, 60)
    assert first_tensor({"hidden": hidden, "logits": logits}, prefer="logits") is logits
    assert first_tensor({"hidden": hidden, "logits": logits}) is hidden


@dataclass
class Result:
    ids: torch.Tensor
    vectors: tuple


def test_the_first_floating_point_tensor_with_an_axis_is_read():
    vectors, ids, loss = torch.randn(2, 3), torch.arange(3), torch.tensor(0.5)
    for output in (vectors, (ids, vectors), {"loss": loss, "x": [ids, vectors]}, Result(ids, (loss, vectors))):
        assert first_tensor(output) is vectors
    assert first_tensor(MaskedLMOutput(loss=loss, logits=vectors)) is vectors
    with pytest.raises(ValueError, match="without a floating-point tensor"):
        first_tensor((ids, loss, None, "text"))


def test_outputs_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"the output is \(1, 2\), but the exact output is \(2, 2\)"):
        METRICS["cosine"](torch.ones(1, 2), torch.ones(2, 2))
