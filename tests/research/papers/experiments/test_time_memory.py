"""The results made of times and memory."""

import pytest

from subquad.research.papers.base import Context
from subquad.research.papers.experiments.time_memory import SCALES, TimeMemoryScale, _times, cells, load_of, results
from subquad.tools.bench.calls import NAIVE

SCALE = TimeMemoryScale(
    lengths=(512, 1024, 2048),
    memory_lengths=(512, 1024, 2048),
    tokens=1024,
    methods=("full", NAIVE, "clustered:clusters=100"),
    visits=2,
)


def found(full=1e-6, linear=1.5e-3):
    """Full grows with N² from `full`·512², clustered with N; the same rounds in each visit."""
    made = {}
    for n in SCALE.lengths:
        batch = load_of(SCALE, n).batch
        times = {"full": full * n * n, NAIVE: 4 * full * n * n, "clustered:clusters=100": linear * n}
        for visit in range(2):
            made[f"time N={n} visit={visit}"] = {
                name: {"seconds": [batch * seconds * (1 + 0.01 * r) for r in range(3)]}
                for name, seconds in times.items()
            }
        peaks = {"full": 1000 * batch * n, NAIVE: 72 * batch * n * n, "clustered:clusters=100": 2000 * batch * n}
        made[f"memory N={n}"] = {name: {"bytes": size, "how": ""} for name, size in peaks.items()}
    return made


def tables(made):
    return {table.title: {row[0]: row[1:] for row in table.rows} for table in results(SCALE, made).tables}


def test_times_and_memory_are_those_of_a_token():
    shown = tables(found())
    assert shown["µs per token: median (quartiles)"]["clustered:clusters=100"] == ["1,515 (1,504–1,526)"] * 3
    assert shown["Bytes per token, peak above the inputs"]["full"] == ["1,000"] * 3


def test_crossings_are_told_against_both_and_beside_the_published():
    row = tables(found())["The paper's statements"]["clustered:clusters=100 is faster than full"]
    assert row == ["from 1,000", "at every length, from 512", "from 1,500"]
    row = tables(found(full=1e-9))["The paper's statements"]["clustered:clusters=100 is faster than full"]
    assert row == ["from 1,000", "not up to 2,048", "not up to 2,048"]


def test_what_fits_goes_on_as_memory_grows():
    held = tables(found())["The paper's statements"]["tokens of one item that 11 GB hold"]
    assert held == ["8,192 (whole layer)", f"{(11e9 / 72) ** 0.5:,.0f}", f"{11e9 / 1000:,.0f}"]


def test_what_was_not_run_has_no_point_and_a_reason():
    made = found()
    for visit in range(2):
        made[f"time N=2048 visit={visit}"]["full"] = {"reason": "predicted 71 s per call"}
        del made[f"time N=2048 visit={visit}"][NAIVE]
    came = results(SCALE, made)
    table = came.tables[1]
    assert table.rows[0][-1] == table.rows[1][-1] == "–"
    assert "full at 2,048 tokens: predicted 71 s per call" in table.note
    time = next(plot for plot in came.plots if plot.file == "time-per-token")
    assert [x for x, _ in time.series["full"]] == [512.0, 1024.0]
    assert {name: len(band) for name, band in time.bands.items()} == {"full": 2, NAIVE: 2, "clustered:clusters=100": 3}


def test_a_naive_softmax_runs_where_it_fits(tmp_path):
    smoke = SCALES["smoke"]
    context = Context(tmp_path, None, "cpu", lambda what, done, total: None)
    runs = {n: set(_times(smoke, n, context)) for n in smoke.lengths}
    assert runs == {64: set(smoke.methods), 128: set(smoke.methods) - {NAIVE}}


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_has_its_own_key(scale):
    keys = [cell.key for cell in cells(SCALES[scale])]
    assert len(set(keys)) == len(keys)
