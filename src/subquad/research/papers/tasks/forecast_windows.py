"""Windows of a series: rows that are read, and the rows after them that are predicted."""

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from subquad.research.training.tasks.task import Item

Values = NDArray[np.float64]


class ForecastWindows(Dataset[Item]):
    """Item i: the rows that are predicted are `first + i`, …, all of them before `end`; the rows before are its past.

    Args:
        read: (rows, channels) of the series that a model reads.
        targets: (rows, targets) of it that a model predicts.
        times: (rows, 5), when each row was taken.
        per_day: rows of a day.
        past: rows that are read.
        horizon: rows that are predicted.
        first, end: the first row that is predicted, and the row after the last one.
    """

    def __init__(
        self,
        read: Values,
        targets: Values,
        times: NDArray[np.float32],
        per_day: int,
        past: int,
        horizon: int,
        first: int,
        end: int,
    ):
        self.targets, self.times, self.per_day = targets, times, per_day
        self.past, self.horizon, self.first, self.end = past, horizon, first, end
        self._read, self._predicted = read.astype(np.float32), targets.astype(np.float32)

    def __len__(self) -> int:
        return self.end - self.horizon - self.first + 1

    def __getitem__(self, index: int) -> Item:
        now = self.first + index
        return {
            "past": self._read[now - self.past : now],
            "times": self.times[now - self.past : now + self.horizon],
            "labels": self._predicted[now : now + self.horizon],
        }

    def labels(self) -> Values:
        """(windows, horizon, targets) of all items."""
        return rows_of_windows(self.targets, self.first, len(self), self.horizon)


def rows_of_windows(rows: Values, first: int, count: int, length: int) -> Values:
    """(count, length, columns): the `length` rows from `first` on, then from the row after it on, and so on; a view."""
    part = rows[first : first + count + length - 1]
    return np.lib.stride_tricks.sliding_window_view(part, length, axis=0).swapaxes(1, 2)
