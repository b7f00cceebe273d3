"""Forecasts of the ETT series by Informer's protocol (Zhou et al. 2021), every window of the test months counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subquad.core.errors import InputError
from subquad.methods import parse_method
from subquad.research.papers.data.ett import CALENDAR, COLUMNS, Series, calendar, read_ett, waves
from subquad.research.papers.tasks.forecast_baselines import last_season, last_value, ridge
from subquad.research.papers.tasks.forecast_windows import ForecastWindows
from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.models.forecaster import (
    EncoderDecoderForecaster,
    EncoderForecaster,
    ForecastConfig,
    Forecaster,
)
from subquad.research.training.tasks.task import Batch, Item, Metrics, Splits, Task

MONTH = 30  # days
ENDS = (12 * MONTH, 16 * MONTH, 20 * MONTH)  # days, of training, validation and test


@dataclass(frozen=True, kw_only=True)
class Forecast(Task):
    """Predict `horizon` rows from the `seq_len` rows before them, at every row of the split.

    The first 12 months of 30 days are for training, the next 4 for validation and 4 more for the test; the rows
    that a window reads may be in the split before. Values are standardised with the mean and the standard deviation of
    the training months. The errors are computed on standardised values, as means over all windows, steps and channels.
    Informer's code drops the windows of the last incomplete batch; here, no window is dropped.

    Attributes:
        dataset: "ETTh1" (hours) or "ETTm1" (quarters of an hour) in the data folder's ett/; "waves" is a generated
            series of 4 rows a day, for a first try.
        features: "S" predicts the oil temperature from its own past, "MS" from all columns; "M" predicts all columns
            from all columns.
        horizon: number of rows that are predicted.
        seq_len: number of rows that are read.
        label_len: number of rows that the decoder reads too: the last ones of the `seq_len` rows.
        architecture: "encoder-decoder", as Informer has it, or "encoder".
        decoder_layers: number of decoder layers; `model.layers` is the number of encoder layers.
        cross_method: method of the decoder's cross-attention, unless `model.method` is a list.
        causal_decoder: whether the decoder's self-attention is causal, as in Informer.
        subtract_last: whether the last row is subtracted from the past and added to the prediction.
    """

    name: ClassVar[str] = "forecast"
    summary: ClassVar[str] = (
        "the next hours or quarters of an hour of an electricity transformer; squared and absolute error"
    )
    metric: ClassVar[str] = "mse"
    greater_is_better: ClassVar[bool] = False
    needs: ClassVar[str | None] = "ett"
    start: ClassVar = {
        "model": {"layers": 2, "heads": 4, "width": 64, "dropout": 0.05, "positions": "sinusoidal"},
        "training": {"steps": 800, "batch": 32, "evaluation_batch": 256, "optimizer": "adam", "schedule": "cosine"},
    }

    dataset: Literal["ETTh1", "ETTm1", "waves"] = "ETTh1"
    features: Literal["S", "MS", "M"] = "S"
    horizon: int = 24
    seq_len: int = 96
    label_len: int = 48
    architecture: Literal["encoder-decoder", "encoder"] = "encoder-decoder"
    decoder_layers: int = 1
    cross_method: str = "full"
    causal_decoder: bool = False
    subtract_last: bool = True

    def __post_init__(self) -> None:
        for name, least in (("horizon", 1), ("seq_len", 2), ("label_len", 0), ("decoder_layers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}, but it must be at least {least}")
        if self.label_len > self.seq_len:
            raise ValueError(f"label_len={self.label_len} is more than seq_len={self.seq_len}, of which it is the end")
        parse_method(self.cross_method)

    def series(self, data: Path | None) -> Series:
        """The rows; InputError where they cannot be had."""
        if self.dataset == "waves":
            return waves()
        if data is None:
            raise InputError(
                f"{self.dataset} is read from the folder of real data: --data-dir FOLDER, or the environment variable "
                "SUBQUAD_DATA; task.dataset=waves needs none"
            )
        return read_ett(data / "ett", self.dataset)

    def splits(self, data: Path | None) -> Splits:
        """Windows of the three stretches of time, scaled by the first."""
        series = self.series(data)
        ends = [days * series.per_day for days in ENDS]
        if len(series.values) < ends[-1]:
            raise InputError(
                f"{self.dataset} has {len(series.values):,} rows, but 20 months of 30 days take {ends[-1]:,}"
            )
        # The shortest stretch; the first loses the rows before its first window, too.
        room = min(ends[0] - self.seq_len, ends[1] - ends[0])
        if self.horizon > room:
            raise InputError(
                f"task.horizon={self.horizon} after task.seq_len={self.seq_len} rows leaves no window: at most {room} "
                f"rows can be predicted in {self.dataset}"
            )
        scaled = standardised(series, ends[0])
        starts = (self.seq_len, ends[0], ends[1])
        times = calendar(series.dates)
        read = scaled[:, -1:] if self.features == "S" else scaled
        targets = scaled if self.features == "M" else scaled[:, -1:]
        sizes = (series.per_day, self.seq_len, self.horizon)
        windows = (ForecastWindows(read, targets, times, *sizes, *bounds) for bounds in zip(starts, ends, strict=True))
        return Splits(*windows)

    def model(self, settings: ModelSettings) -> Forecaster:
        """One of the two architectures."""
        decodes = self.architecture == "encoder-decoder"
        channels = 1 if self.features == "S" else len(COLUMNS)
        config = settings.config(
            ForecastConfig,
            longest=max(self.seq_len, self.label_len + self.horizon),
            channels=channels,
            targets=channels if self.features == "M" else 1,
            time_features=CALENDAR,
            past=self.seq_len,
            label=self.label_len,
            horizon=self.horizon,
            decoder_layers=self.decoder_layers if decodes else 0,
            cross_method=self.cross_method,
            causal_decoder=self.causal_decoder,
            subtract_last=self.subtract_last,
        )
        return EncoderDecoderForecaster(config) if decodes else EncoderForecaster(config)

    def collate(self, items: Sequence[Item]) -> Batch:
        """All items are of one size."""
        return {name: torch.from_numpy(np.stack([item[name] for item in items])) for name in items[0]}

    def score(self, outputs: Any, batch: Batch) -> Tensor:
        """Each window's mean squared and mean absolute error."""
        error = (outputs.logits - batch["labels"]).float().flatten(1)
        return torch.stack([error.square().mean(1), error.abs().mean(1)], dim=1)

    def metrics(self, scores: Tensor) -> Metrics:
        """Means over the windows, which are all of one size."""
        mse, mae = scores.double().mean(0).tolist()
        return {"mse": mse, "mae": mae}

    def baselines(self, splits: Splits, data: Path | None = None) -> dict[str, Metrics]:
        """The baselines, on the same windows, are a linear forecast, and copies of the last row and of the last day."""
        train, validation, test = (
            cast(ForecastWindows, split) for split in (splits.train, splits.validation, splits.test)
        )
        predicted = {
            "ridge": ridge(train, validation, test, self.horizon),
            "last value": last_value(test, self.horizon),
            "last season": last_season(test, self.horizon),
        }
        labels = test.labels()
        return {name: errors(forecast, labels) for name, forecast in predicted.items()}


def standardised(series: Series, end: int) -> NDArray[np.float64]:
    """The values, less the mean and over the standard deviation of those before `end`."""
    known = series.values[:end]
    return (series.values - known.mean(0)) / known.std(0)


def errors(forecast: NDArray[np.float64], labels: NDArray[np.float64]) -> Metrics:
    """Means over windows, steps and channels."""
    return {"mse": float(np.square(forecast - labels).mean()), "mae": float(np.abs(forecast - labels).mean())}
