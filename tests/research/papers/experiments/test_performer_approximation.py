"""Errors of random features: measured where they are said to be."""

import pytest
import torch

from subquad.research.papers.base import Context
from subquad.research.papers.experiments.performer_approximation import (
    MEAN_POOL,
    SCALES,
    PerformerApproximationScale,
    attention_key,
    cells,
    head_errors,
    kernel_points,
    performer,
    results,
    squared_norm,
)

SMOKE = SCALES["smoke"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cells")
    context = Context(folder / "own", None, "cpu", lambda what, done, total: None)
    return {cell.key: cell.run(context) for cell in cells(SMOKE)}


def test_all_kinds_have_as_many_features():
    assert performer("hyperbolic", "iid", 64, 1.0).features == 32
    assert performer("positive", "iid", 64, 1.0).features == 64


def test_the_squared_norm_is_that_of_all_pairs():
    q, k = torch.randn(2, 1, 3, 10, 4, generator=torch.Generator().manual_seed(0))
    pairs = (q[:, :, :, None] + k[:, :, None]).square().sum(-1).mean()
    assert squared_norm(q, k, 0.5) == pytest.approx(0.5 * float(pairs), rel=1e-5)
    shared = squared_norm(q, k[:, :1], 1.0)
    assert shared == pytest.approx(squared_norm(q, k[:, :1].expand(-1, 3, -1, -1), 1.0), rel=1e-5)


def test_errors_of_heads_are_relative():
    exact = torch.ones(1, 2, 5, 4)
    out = torch.stack([exact[:, 0], 1.5 * exact[:, 1]], dim=1)
    assert head_errors(out, exact) == pytest.approx([0.0, 0.5])


def test_one_of_norm_and_features_is_fixed_while_the_other_varies():
    scale = PerformerApproximationScale(length=8, kernel_features=(16, 64), norms=(0.5, 1.0), norm=1.0)
    assert kernel_points(scale) == [(1.0, 16), (1.0, 64), (0.5, 64)]


def test_results_have_all_three_parts_with_the_mean_beside_them(found):
    came = results(SMOKE, found)
    titles = [table.title for table in came.tables]
    assert [sum(word in title for title in titles) for word in ("e^(x·y)", "Mean square", "encoder", "Why")] == [
        2,
        1,
        1,
        1,
    ]
    encoder = came.tables[3]
    assert [row[0] for row in encoder.rows][-1] == MEAN_POOL
    assert len(came.tables[4].rows) == 2  # layers
    drawn = {plot.file: plot for plot in came.plots}
    assert set(drawn) == {
        "kernel-by-features", "kernel-by-norm", "attention-output-0.5", "attention-matrix-0.5", "encoder-error"
    }  # fmt: skip
    sample = found[attention_key(0.5, 0)]
    assert drawn["attention-output-0.5"].levels == {MEAN_POOL: sample[MEAN_POOL]["output"]}
    assert drawn["attention-matrix-0.5"].series["positive iid"][1] == (8.0, sample["positive iid"]["8"]["matrix"])


def test_more_features_are_closer(tmp_path):
    scale = PerformerApproximationScale(length=32, deviations=(0.5,), features=(8, 512), samples=1)
    cell = next(cell for cell in cells(scale) if cell.key == attention_key(0.5, 0))
    own = cell.run(Context(tmp_path, None, "cpu", lambda what, done, total: None))["positive orthogonal"]
    assert own["512"]["matrix"] < 0.3 * own["8"]["matrix"]
    assert own["512"]["output"] < 0.3 * own["8"]["output"]
