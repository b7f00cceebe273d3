"""Histograms of buckets."""

import pytest

from subquad.research.papers.experiments.bucket_imbalance import BINS, ratio_histogram, size_histogram, together

LAYERS = {
    "0": {"queries": [[4, 0, 0, 4]], "keys": [[1, 3, 0, 4]]},
    "1": {"queries": [[8, 0, 0, 0]], "keys": [[2, 6, 0, 0]]},
}


def test_buckets_of_all_layers_and_runs_are_put_together():
    sizes = together([LAYERS, LAYERS])
    assert sizes.total.tolist() == [[[5, 3, 0, 8], [10, 6, 0, 0]] * 2]


def test_sizes_are_counted_from_none_to_all_tokens():
    histogram = dict(size_histogram(together([LAYERS]), 16))
    assert len(histogram) == BINS
    assert sum(histogram.values()) == pytest.approx(1.0)
    assert histogram[0.5] == 3 / 8  # the empty ones
    assert histogram[10.5] == 1 / 8


def test_ratios_are_those_of_buckets_with_both():
    histogram = dict(ratio_histogram(together([LAYERS])))
    assert histogram == {step / 2: 0.0 for step in range(-8, 9)} | {0.0: 1 / 3, 2.0: 2 / 3}
