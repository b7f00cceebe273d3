"""The ETT reader on files that the tests write."""

import gzip

import numpy as np
import pytest

from subquad.core.errors import InputError
from subquad.research.papers.data.ett import COLUMNS, calendar, read_ett, waves

HEADER = "date," + ",".join(COLUMNS)


def row(minute, *values):
    when = np.datetime64("2016-07-01T00:00:00") + np.timedelta64(minute, "m")
    return f"{str(when).replace('T', ' ')},{','.join(map(str, values or range(7)))}"


def write(folder, lines, name="ETTh1.csv"):
    text = "\n".join(lines) + "\n"
    if name.endswith(".gz"):
        (folder / name).write_bytes(gzip.compress(text.encode()))
    else:
        (folder / name).write_text(text)
    return folder


def test_columns_and_dates(tmp_path):
    series = read_ett(write(tmp_path, [HEADER, row(0), row(60, *range(1, 8)), row(120)]), "ETTh1")
    assert series.values.tolist() == [[*range(7)], [*range(1, 8)], [*range(7)]]
    assert series.per_day == 24
    assert series.dates[1] == np.datetime64("2016-07-01T01:00:00")


def test_quarters_of_an_hour_packed(tmp_path):
    series = read_ett(write(tmp_path, [HEADER, row(0), row(15)], "ETTm1.csv.gz"), "ETTm1")
    assert series.per_day == 96
    assert series.values.shape == (2, 7)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([HEADER.replace("OT", "oil"), row(0)], "LULL, oil; it must have date, HUFL"),
        ([], "must have date, HUFL"),
        ([HEADER, row(0)], "has 1 rows"),
        ([HEADER, row(0), row(60).replace("3", "three")], "line 3: not a date and numbers"),
        ([HEADER, row(0), "yesterday,1,2,3,4,5,6,7"], "line 3: not a date and numbers"),
        ([HEADER, row(0), row(60, 1, 2)], "line 3: 3 fields; it must have 8"),
        ([HEADER, row(0), row(60, *[float("nan")] * 7)], "line 3: 8 fields; it must have 8, all finite"),
        ([HEADER, row(0), row(60), row(180)], "line 4: 7200 seconds after the row before; all others are 3600"),
        ([HEADER, row(0), row(7)], "420 seconds apart do not make up a day"),
    ],
)
def test_malformed_files_are_named_with_their_line(tmp_path, lines, said):
    with pytest.raises(InputError, match=r"ETTh1\.csv") as caught:
        read_ett(write(tmp_path, lines), "ETTh1")
    assert said in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"neither ETTh1\.csv nor ETTh1\.csv\.gz is in"):
        read_ett(tmp_path, "ETTh1")


def test_cut_off_archive(tmp_path):
    write(tmp_path, [HEADER, *(row(15 * n) for n in range(50))], "ETTm1.csv.gz")
    whole = (tmp_path / "ETTm1.csv.gz").read_bytes()
    (tmp_path / "ETTm1.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot be read as CSV"):
        read_ett(tmp_path, "ETTm1")


def test_calendar():
    friday, new_years_eve = np.datetime64("2016-07-01T00:00:00"), np.datetime64("2016-12-31T23:59:00")
    first, last = calendar(np.array([friday, new_years_eve]))
    np.testing.assert_allclose(first, [-0.5, -0.5, 4 / 6 - 0.5, -0.5, 182 / 365 - 0.5], rtol=1e-6)
    np.testing.assert_allclose(last, [0.5, 0.5, 5 / 6 - 0.5, 0.5, 0.5], rtol=1e-6)


def test_waves_come_from_their_seed():
    series = waves(days=10, per_day=4)
    assert series.values.shape == (40, 7)
    assert (np.diff(series.dates) == np.timedelta64(6, "h")).all()
    assert np.array_equal(series.values, waves(days=10, per_day=4).values)
    assert not np.array_equal(series.values, waves(days=10, per_day=4, seed=1).values)
