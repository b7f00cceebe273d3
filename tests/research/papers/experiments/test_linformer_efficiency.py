"""Linformer's table 3: what is published, what is predicted, what is divided by what."""

import pytest

from subquad.research.papers.experiments.linformer_efficiency import (
    PUBLISHED,
    PUBLISHED_K,
    QUANTITIES,
    LinformerEfficiencyScale,
    TimingSeries,
    linformer,
    load_of,
    published,
    results,
)
from subquad.research.papers.side_by_side import naive_gib

SCALE = LinformerEfficiencyScale(lengths=(64, 128, 256), k=(16, 128))


def test_a_figure_that_was_not_measured_grows_and_is_marked():
    series = TimingSeries(2, {32: 10.0})
    assert (series.ratio(32, 5.0), series.ratio(64, 5.0), series.ratio(64, 1.0)) == ("2.0×", "~8.0×", "~40×")
    assert series.ratio(16, 1.0) is None
    assert series.ratio(32, None) is None


@pytest.mark.parametrize("figure", QUANTITIES)
def test_the_published_grid_has_a_figure_for_each_k_below_n(figure):
    for n, row in PUBLISHED[figure].items():
        assert len(row) == sum(k < n for k in PUBLISHED_K)
    assert published(figure, 512, 512) is None
    assert published(figure, 512, 100) is None
    assert published(figure, 100, 128) is None


def test_a_batch_is_as_large_as_a_naive_softmax_allows():
    scale = LinformerEfficiencyScale(lengths=(512, 8192), gib=1.0, most=16)
    assert load_of(scale, 512).batch == 16
    assert load_of(LinformerEfficiencyScale(lengths=(512,), gib=1.0, most=1000), 512).batch == 85
    assert naive_gib(load_of(scale, 4096)) <= 1.0
    assert load_of(scale, 8192).batch == 1


def test_ratios_stand_beside_the_published_ones():
    own = linformer(16)
    made = {
        "time n=64": {"naive": [8.0], "full": [4.0], own: [2.0, 2.0, 5.0]},
        "time n=128": {"full": [16.0], own: [4.0]},
        "time n=256": {own: [8.0], linformer(128): [32.0]},
        "memory n=64": {"naive": 12.0, "full": 1.0, own: 2.0},
        "memory n=128": {"full": 2.0, own: 4.0},
        "memory n=256": {own: 8.0, linformer(128): 16.0},
    }
    came = results(SCALE, made)
    rows = {table.title: [list(row) for row in table.rows] for table in came.tables}
    assert rows["Time saved against SDPA"] == [["64", "2.0×", "–"], ["128", "4.0×", "–"], ["256", "~8.0×", "~2.0×"]]
    assert rows["Time saved against a naive softmax: ours (published)"][2] == ["256", "~16×", "~4.0×"]
    assert rows["Memory saved against SDPA"][2] == ["256", "~0.5×", "~0.2×"]  # SDPA's memory grows by n
    assert rows["What the ratios are made of"][0] == ["64", 16, "8.0", "4.0", "2.0", "12.0", "1.0", "2.0"]
    assert came.plots[0].series["SDPA: k=16"] == [(64.0, 2.0), (128.0, 4.0), (256.0, 8.0)]


def test_published_figures_stand_in_the_table_against_a_naive_softmax():
    scale = LinformerEfficiencyScale(lengths=(512,), k=(128, 256))
    made = {
        "time n=512": {"naive": [3.0], linformer(128): [1.0], linformer(256): [1.0]},
        "memory n=512": {"naive": 3.0},
    }
    time, memory, *_ = results(scale, made).tables
    assert list(time.rows[0]) == ["512", "3.0× (1.5×)", "3.0× (1.3×)"]
    assert list(memory.rows[0]) == ["512", "– (1.7×)", "– (1.5×)"]
