"""Forecasters of series: Informer's encoder-decoder, which writes all steps in one pass, and an encoder alone."""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float
from torch import Tensor, nn

from subquad.core.errors import check_least
from subquad.research.training.models.blocks import AttentionModel, InputPositions, Prediction, Stack
from subquad.research.training.models.configuration import AttentionConfig
from subquad.research.training.models.positional_encodings import counted
from subquad.research.training.models.splitting import ModelSplit, split


@strict
class ForecastConfig(AttentionConfig):
    """A forecaster; `num_hidden_layers` are the encoder's.

    Attributes:
        channels: of the past.
        targets: the last channels, which are predicted.
        time_features: numbers for the time of a row.
        past: rows that are read.
        label: of these, the last that the decoder reads, too.
        horizon: rows that are predicted.
        decoder_layers: each with self-attention and cross-attention; an encoder alone has none.
        cross_method: the method of cross-attention, where `method` is one for all layers and not a list.
        causal_decoder: mask the decoder's self-attention causally, as Informer does. Nothing leaks without: in the
            place of the future the decoder reads zeros. With it, `method` must be strictly causal there.
        subtract_last: read the past less its last row, and add that row to what is predicted, so that a shift of the
            level between training and test does not matter. Informer does not.
    """

    model_type = "subquad-forecaster"

    channels: int = 1
    targets: int = 1
    time_features: int = 5
    past: int = 96
    label: int = 48
    horizon: int = 24
    decoder_layers: int = 1
    cross_method: str = "full"
    causal_decoder: bool = False
    subtract_last: bool = True
    positions: str = "sinusoidal"

    def validate_architecture(self) -> None:
        """Refuse sizes that no model can be made of."""
        super().validate_architecture()
        check_least(self, channels=1, targets=1, time_features=1, past=1, label=0, horizon=1, decoder_layers=0)
        for name, whole in (("targets", "channels"), ("label", "past")):
            if getattr(self, name) > getattr(self, whole):
                raise ValueError(f"{name}={getattr(self, name)} is more than {whole}={getattr(self, whole)}, its whole")

    def method_of(self, layer: int) -> str:
        """The method of a layer; the decoder's cross-attention, every second layer, has its own."""
        behind = layer - self.num_hidden_layers
        crosses = behind >= 0 and behind % 2 == 1
        return self.cross_method if crosses and isinstance(self.method, str) else super().method_of(layer)


class SeriesEmbedding(nn.Module):
    """Rows as tokens: a convolution over three of them, plus when they were taken, plus their positions."""

    def __init__(self, config: ForecastConfig):
        super().__init__()
        width = config.hidden_size
        self.values = nn.Conv1d(config.channels, width, 3, padding=1, padding_mode="replicate", bias=False)
        self.times = nn.Linear(config.time_features, width)
        self.input_positions = InputPositions(config)

    def forward(
        self, values: Float[Tensor, "B N C"], times: Float[Tensor, "B N T"], positions: Tensor, here: ModelSplit
    ) -> Tensor:
        """(B, rows, width): of this rank's rows, of which `positions` are."""
        x = here.shard(self.values(values.transpose(1, 2)).transpose(1, 2))
        return self.input_positions(x + self.times(here.shard(times)), positions)


class Forecaster(AttentionModel):
    """The base class of both forecasters: what they read and predict, their level and their loss."""

    config_class = ForecastConfig

    def forward(
        self,
        past: Float[Tensor, "B N C"],
        times: Float[Tensor, "B R T"],
        labels: Float[Tensor, "B S O"] | None = None,
        **_: Any,
    ) -> Prediction:
        """The rows after the past, and their mean squared error. `times`: of the past and of these rows.

        Raises:
            ValueError: a past, or times, of another length than the config's.
        """
        config = self.config
        rows = config.past + config.horizon
        if past.shape[1] != config.past or times.shape[1] != rows:
            raise ValueError(
                f"the model reads {config.past} rows and predicts {config.horizon}, but past has {past.shape[1]} rows "
                f"and times {times.shape[1]} instead of {rows}"
            )
        level = past[:, -1:] if config.subtract_last else torch.zeros_like(past[:, -1:])
        predicted = self.predict(past - level, times) + level[..., -config.targets :]
        loss = None if labels is None else (predicted - labels).float().square().mean()
        return Prediction(loss=loss, logits=predicted)

    def predict(self, past: Tensor, times: Tensor) -> Tensor:
        """(B, horizon, targets), on the level that was subtracted."""
        raise NotImplementedError


class EncoderDecoderForecaster(Forecaster):
    """Informer's frame (Zhou et al. 2021), without its distilling between the layers of the encoder.

    The decoder reads the last `label` rows of the past, then zeros with the times of the future in the place of the
    rows to come, attends to itself and to the encoder's past, and predicts all of them at once.

    >>> import torch
    >>> from subquad.research.training.models import EncoderDecoderForecaster, ForecastConfig
    >>> config = ForecastConfig(channels=7, targets=7, hidden_size=32, method="clustered:clusters=9")
    >>> EncoderDecoderForecaster(config)(torch.randn(2, 96, 7), torch.randn(2, 120, 5)).logits.shape
    torch.Size([2, 24, 7])
    """

    def __init__(self, config: ForecastConfig):
        super().__init__(config)
        layers = config.num_hidden_layers
        self.encoder_embedding, self.decoder_embedding = SeriesEmbedding(config), SeriesEmbedding(config)
        self.encoder = Stack(config, layers)
        self.decoder = Stack(config, config.decoder_layers, first=layers, cross=True, causal=config.causal_decoder)
        self.head = nn.Linear(config.hidden_size, config.targets)
        self.finish()

    def predict(self, past: Tensor, times: Tensor) -> Tensor:
        """One pass for all steps."""
        config = self.config
        known = past[:, config.past - config.label :]
        values = torch.cat([known, known.new_zeros(len(past), config.horizon, config.channels)], dim=1)
        read, written = split(past.shape[1]), split(values.shape[1])
        positions = read.shard(counted(past))
        with read.attending():
            source = self.encoder_embedding(past, times[:, : config.past], positions, read)
            source = self.encoder(source, None, positions)
        positions = written.shard(counted(values))
        with written.attending():
            x = self.decoder_embedding(values, times[:, config.past - config.label :], positions, written)
            across = split(values.shape[1], past.shape[1])
            x = self.head(self.decoder(x, None, positions, source=source, across=across))
        return written.whole(x)[:, config.label :]


class EncoderForecaster(Forecaster):
    """An encoder of the past; each row to come is a learned mean of its tokens, then of their features.

    >>> import torch
    >>> from subquad.research.training.models import EncoderForecaster, ForecastConfig
    >>> config = ForecastConfig(channels=7, targets=1, hidden_size=32, method="clustered:clusters=9")
    >>> EncoderForecaster(config)(torch.randn(2, 96, 7), torch.randn(2, 120, 5)).logits.shape
    torch.Size([2, 24, 1])
    """

    def __init__(self, config: ForecastConfig):
        super().__init__(config)
        self.embedding = SeriesEmbedding(config)
        self.encoder = Stack(config, config.num_hidden_layers)
        self.rows = nn.Linear(config.past, config.horizon)
        self.head = nn.Linear(config.hidden_size, config.targets)
        self.finish()

    def predict(self, past: Tensor, times: Tensor) -> Tensor:
        """From the tokens of the past to the rows to come; their times are not read."""
        here = split(past.shape[1])
        positions = here.shard(counted(past))
        with here.attending():
            x = self.embedding(past, times[:, : past.shape[1]], positions, here)
            hidden = self.encoder(x, None, positions)
        rows = nn.functional.linear(hidden.transpose(1, 2), here.shard(self.rows.weight))
        return self.head((here.sum(rows) + self.rows.bias).transpose(1, 2))
