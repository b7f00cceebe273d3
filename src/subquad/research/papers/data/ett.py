"""The ETT series (Zhou et al. 2021): two years of an electricity transformer's six loads and its oil temperature."""

import csv
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Shaped

from subquad.core.errors import InputError

COLUMNS = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")  # the last is the oil temperature
DATASETS = ("ETTh1", "ETTm1")
CALENDAR = 5  # numbers for the time of a row
MINUTES = 24 * 60

Dates = Shaped[np.ndarray, " T"]  # datetime64 of seconds


@dataclass(frozen=True)
class Series:
    """Rows at equal steps of time.

    Attributes:
        dates: (T,), datetime64 of seconds.
        values: (T, 7), as `COLUMNS`.
        per_day: rows of a day.
    """

    dates: Dates
    values: Float[np.ndarray, "T C"]
    per_day: int


def read_ett(folder: Path, dataset: str) -> Series:
    """ETTh1 (hours) or ETTm1 (quarters of an hour), from `dataset`.csv or .csv.gz in a folder.

    Raises:
        InputError: no such file, other columns, a field that is not a number or a date, or steps of time that differ.
    """
    paths = [folder / f"{dataset}.csv", folder / f"{dataset}.csv.gz"]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise InputError(f"neither {paths[0].name} nor {paths[1].name} is in {folder}")
    rows = _rows(path)
    wanted = ["date", *COLUMNS]
    header = next(rows, (0, []))[1]
    if header != wanted:
        raise InputError(f"{path} has the columns {', '.join(header)}; it must have {', '.join(wanted)}")
    dates, values = [], []
    for line, row in rows:
        try:
            dates.append(np.datetime64(row[0], "s"))
            values.append([float(field) for field in row[1:]])
        except (ValueError, IndexError):
            raise InputError(f"{path}, line {line}: not a date and numbers: {', '.join(row)[:80]!r}") from None
        if len(row) != len(wanted) or not np.isfinite(values[-1]).all():
            raise InputError(f"{path}, line {line}: {len(row)} fields; it must have {len(wanted)}, all finite")
    if len(dates) < 2:
        raise InputError(f"{path} has {len(dates)} rows; it must have 2 or more")
    when = np.array(dates)
    return Series(when, np.array(values), _per_day(path, when))


def waves(days: int = 600, per_day: int = 4, seed: int = 0) -> Series:
    """A made series in the place of a file: a daily and a weekly wave, a random walk and noise in each column."""
    draw = np.random.default_rng(seed)
    count = days * per_day
    day = np.arange(count)[:, None] / per_day
    phases, sizes = draw.uniform(0, 1, (2, 1, len(COLUMNS))), draw.uniform(0.5, 2.0, (2, 1, len(COLUMNS)))
    periodic = sizes[0] * np.sin(2 * np.pi * (day + phases[0])) + sizes[1] * np.sin(2 * np.pi * (day / 7 + phases[1]))
    walk = draw.normal(0, 0.05, (count, len(COLUMNS))).cumsum(0)
    step = np.timedelta64(MINUTES // per_day * 60, "s")
    dates = np.datetime64("2016-07-01T00:00:00", "s") + np.arange(count) * step
    return Series(dates, periodic + walk + draw.normal(0, 0.2, (count, len(COLUMNS))), per_day)


def calendar(dates: Dates) -> Float[np.ndarray, "T F"]:
    """(T, 5): minute of the hour, hour of the day, day of the week, of the month and of the year, from −½ to ½."""
    minutes = dates.astype("datetime64[m]").astype(np.int64)
    days = dates.astype("datetime64[D]")
    first_of_month, first_of_year = days.astype("datetime64[M]"), days.astype("datetime64[Y]")
    parts = (
        (minutes % 60, 59),
        (minutes // 60 % 24, 23),
        ((days.astype(np.int64) + 3) % 7, 6),  # day 0 of the epoch was a Thursday; 0 is Monday
        ((days - first_of_month.astype("datetime64[D]")).astype(np.int64), 30),
        ((days - first_of_year.astype("datetime64[D]")).astype(np.int64), 365),
    )
    return np.stack([number / most - 0.5 for number, most in parts], axis=1).astype(np.float32)


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(number, fields) of each line."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            for row in reader:
                yield reader.line_num, row
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as CSV: {error}") from None


def _per_day(path: Path, dates: Dates) -> int:
    """Rows of a day; InputError where the steps differ, or where none of them makes up a day."""
    steps = np.diff(dates)
    odd = np.flatnonzero(steps != steps[0])
    if len(odd):
        line = int(odd[0]) + 3  # the header is line 1, and the step leads to the row after
        raise InputError(f"{path}, line {line}: {steps[odd[0]]} after the row before; all others are {steps[0]} apart")
    seconds = int(steps[0].astype(np.int64))
    if seconds <= 0 or MINUTES * 60 % seconds:
        raise InputError(f"{path}: rows {seconds} seconds apart do not make up a day")
    return MINUTES * 60 // seconds
