"""Forecasts without attention: a linear one, the last row again, the last day again."""

import numpy as np

from subquad.research.papers.tasks.forecast_windows import ForecastWindows, Values, rows_of_windows

LENGTHS = (48, 96, 168, 336)  # rows of the past that the linear forecast may read
PENALTIES = (1.0, 100.0, 10_000.0)


def last_value(windows: ForecastWindows, horizon: int) -> Values:
    """(windows, horizon, targets): the row before, again and again."""
    return np.repeat(rows_of_windows(windows.targets, windows.first - 1, len(windows), 1), horizon, axis=1)


def last_season(windows: ForecastWindows, horizon: int) -> Values:
    """(windows, horizon, targets): the day before, again and again."""
    day = rows_of_windows(windows.targets, windows.first - windows.per_day, len(windows), windows.per_day)
    return day[:, np.arange(horizon) % windows.per_day]


def ridge(train: ForecastWindows, validation: ForecastWindows, test: ForecastWindows, horizon: int) -> Values:
    """(windows, horizon, targets): every step a linear function of the channel's own past, which is level-free.

    Past and steps are less the last value of the past. Each channel has a regression of its own, whose length of past
    and penalty are those with the least squared error on the validation windows; so it may read more rows, or fewer,
    than the model.
    """
    channels = [_ridge(train, validation, test, horizon, channel) for channel in range(test.targets.shape[1])]
    return np.stack(channels, axis=2)


def _ridge(
    train: ForecastWindows, validation: ForecastWindows, test: ForecastWindows, horizon: int, channel: int
) -> Values:
    from sklearn.linear_model import Ridge

    best, chosen = np.inf, None
    for length in LENGTHS:
        if length + horizon > train.end:
            continue
        past, steps, _ = _level_free(train, length, horizon, channel)
        unseen, wanted, _ = _level_free(validation, length, horizon, channel)
        for penalty in PENALTIES:
            model = Ridge(alpha=penalty).fit(past, steps)
            error = float(np.square(model.predict(unseen) - wanted).mean())
            if error < best:
                best, chosen = error, (model, length)
    assert chosen is not None
    model, length = chosen
    past, _, level = _level_free(test, length, horizon, channel)
    return np.asarray(model.predict(past) + level)


def _level_free(windows: ForecastWindows, length: int, horizon: int, channel: int) -> tuple[Values, Values, Values]:
    """(windows, length) of past and (windows, horizon) of steps, both less the last value; and that, (windows, 1)."""
    first = max(windows.first, length)
    count = windows.end - horizon - first + 1
    column = windows.targets[:, channel : channel + 1]
    past = rows_of_windows(column, first - length, count, length)[..., 0]
    steps = rows_of_windows(column, first, count, horizon)[..., 0]
    level = past[:, -1:]
    return past - level, steps - level, level
