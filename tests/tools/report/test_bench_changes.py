"""The changes between two runs: only those beyond the noise."""

from dataclasses import replace

import pytest

from subquad.tools.bench.changes import TOLERANCE, changes
from tests.tools.report import sample_bench


def pair(**figures):
    """A run, and one in which the first cell of `clustered` has other figures."""
    old, new = sample_bench.report(), sample_bench.report()
    change(new, lambda cell: {name: value(cell) if callable(value) else value for name, value in figures.items()})
    return old, new


def change(report, figures):
    """Give the first cell of `clustered` other figures."""
    i, cell = next((i, cell) for i, cell in enumerate(report.cells) if cell.method == "clustered")
    report.cells[i] = replace(cell, **figures(cell))


def verdict(old, new):
    return next(c for c in changes(old, new, "old.json").cells if c.method == "clustered").verdict


def speedups(factor, spread):
    return {
        "speedup": lambda c: 2.56 * factor,
        "speedup_low": lambda c: 2.56 * factor * (1 - spread),
        "speedup_high": lambda c: 2.56 * factor * (1 + spread),
    }


@pytest.mark.parametrize(("factor", "spread", "expected"), [
    (1.20, 0.02, "faster"),
    (0.80, 0.02, "slower"),
    (1.20, 0.30, "within the noise"),  # the quartiles overlap
    (0.80, 0.30, "within the noise"),
    (1.04, 0.001, "within the noise"),  # they do not, but the change is below the tolerance
    (0.97, 0.001, "within the noise"),
    (1.00, 0.02, "within the noise"),
])  # fmt: skip
def test_verdict(factor, spread, expected):
    old, new = pair(**speedups(factor, spread))
    assert verdict(old, new) == expected


@pytest.mark.parametrize(("then", "now", "expected"), [
    ([2.5, 2.6, 2.5], [3.0, 3.1, 3.2], "faster"),
    ([2.5, 2.6, 3.05], [3.0, 3.1, 3.2], "within the noise"),  # one visit of the old run was as fast
    ([2.5, 2.6, 2.5], [3.0, 3.1, 2.55], "within the noise"),  # one of the new run as slow
    ([2.5, 2.6, 3.05], None, "faster"),  # a file without visits: the quartiles alone
])  # fmt: skip
def test_every_visit_must_agree(then, now, expected):
    old, new = pair(**speedups(1.2, 0.02), visits=now)
    change(old, lambda cell: {"visits": then})
    assert verdict(old, new) == expected


def test_tolerance_alone_decides_when_there_is_no_noise():
    for factor, expected in ((1 + TOLERANCE - 0.001, "within the noise"), (1 + TOLERANCE + 0.001, "faster")):
        old, new = pair(**speedups(factor, 0.0))
        for report in (old, new):
            change(report, lambda cell: {"speedup_low": cell.speedup, "speedup_high": cell.speedup})
        assert verdict(old, new) == expected


def test_a_slower_machine_is_no_change():
    old, new = sample_bench.report(), sample_bench.report()
    slower = [replace(cell, ms=3 * cell.ms, ms_low=3 * cell.ms_low, ms_high=3 * cell.ms_high) for cell in new.cells]
    found = changes(old, replace(new, cells=slower), "old.json")
    assert {c.verdict for c in found.cells} == {"within the noise", "no speed-up to compare"}
    assert all(c.time_ratio == pytest.approx(1 / 3) for c in found.cells)
    assert {c.method for c in found.cells if c.verdict == "no speed-up to compare"} == {"full"}


def test_without_sdpa_there_is_no_verdict_but_a_ratio_of_times():
    old = sample_bench.report(not_run=[("full", 256)])
    new = sample_bench.report()
    assert verdict(old, new) == verdict(new, old) == "no speed-up to compare"
    found = next(c for c in changes(old, new, "x").cells if c.method == "clustered")
    assert (found.speedup_ratio, found.time_ratio) == (None, 1.0)
    assert found.speedups == [None, pytest.approx(2.56)]


def test_memory_is_compared_where_both_have_it():
    old, new = pair(extra_bytes=lambda c: 2 * c.extra_bytes)
    assert next(c for c in changes(old, new, "x").cells if c.method == "clustered").memory_ratio == 2.0
    old, new = pair(extra_bytes=None)
    assert next(c for c in changes(old, new, "x").cells if c.method == "clustered").memory_ratio is None


def test_cells_in_one_of_the_files_are_named():
    old, new = sample_bench.report(lengths=(256, 512)), sample_bench.report(lengths=(512, 1024))
    found = changes(old, new, "x")
    assert len(found.cells) == len(found.only_old) == len(found.only_new) == 9
    assert "clustered, float32, forward, 256 tokens" in found.only_old
    assert "full, bfloat16, forward, 1,024 tokens" in found.only_new


def test_what_else_differs_is_told():
    old, new = sample_bench.report(), sample_bench.report()
    assert changes(old, new, "x").notes == []
    new.hardware["threads"], new.settings["seed"] = "8", 12
    del new.versions["torch"]
    new.settings["lengths"] = [1]  # shows in the cells
    assert changes(old, replace(new, backend="reference"), "x").notes == [
        "backend: cpu then, reference now",
        "hardware threads: 4 then, 8 now",
        "version of torch: 2.13.0 then, none now",
        "setting seed: 0 then, 12 now",
    ]
