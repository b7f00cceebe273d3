"""An encoder of speech: filter banks in, digits or phonemes out, aligned by connectionist temporal classification."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from subquad.core.errors import check_least
from subquad.research.training.models.blocks import AttentionModel, InputPositions, Prediction, Stack
from subquad.research.training.models.configuration import AttentionConfig
from subquad.research.training.models.positional_encodings import counted
from subquad.research.training.models.splitting import split

BLANK = 0
PADDING = -100  # in labels, after an item's symbols


@strict
class SpeechConfig(AttentionConfig):
    """An encoder of frames of filter banks.

    Attributes:
        bands: energies a frame.
        symbols: number of output symbols, with the blank, which is 0.
        subsample: frames that are joined into one token before the first layer; 1: each frame is a token.
    """

    model_type = "subquad-speech"

    bands: int = 40
    symbols: int = 11
    subsample: int = 1
    positions: str = "sinusoidal"

    def validate_architecture(self) -> None:
        """Refuse sizes that no model can be made of."""
        super().validate_architecture()
        check_least(self, bands=1, symbols=2, subsample=1)


@dataclass
class Transcription(Prediction):
    """The loss, where there are labels, logits (B, tokens, symbols), and how many tokens of each item are real."""

    lengths: Tensor | None = None


class CTCEncoder(AttentionModel):
    """Transcribe speech without an alignment (Graves et al. 2006).

    >>> import torch
    >>> from subquad.research.training.models import CTCEncoder, SpeechConfig
    >>> model = CTCEncoder(SpeechConfig(hidden_size=32, num_hidden_layers=1, method="i-clustered:clusters=4"))
    >>> model(torch.randn(2, 50, 40)).logits.shape
    torch.Size([2, 50, 11])
    """

    config_class = SpeechConfig

    def __init__(self, config: SpeechConfig):
        super().__init__(config)
        self.frames = nn.Linear(config.subsample * config.bands, config.hidden_size)
        self.input_positions = InputPositions(config)
        self.stack = Stack(config, config.num_hidden_layers)
        self.head = nn.Linear(config.hidden_size, config.symbols)
        self.finish()

    def forward(
        self,
        features: Float[Tensor, "B T F"],
        attention_mask: Int[Tensor, "B T"] | None = None,
        labels: Int[Tensor, "B L"] | None = None,
        **_: Any,
    ) -> Transcription:
        """Logits of each token, and the mean over items of −ln p(labels) / number of labels.

        Args:
            features: frames; those of an item come first, its padding after them.
            attention_mask: 1 for real frames; none: all are.
            labels: symbols 1, 2, …, then −100 as padding.

        Raises:
            ValueError: padding before a real frame, or more symbols than the tokens of an item can write: its loss
                would be infinite, and to count it as 0 would hide that.
        """
        tokens, lengths = self._tokens(features, attention_mask)
        here = split(tokens.shape[1])
        valid = here.shard(torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None])
        positions = here.shard(counted(tokens))
        with here.attending():
            # As loud as the sinusoids that are added (Vaswani et al. 2017, section 3.4); else little of it is heard.
            x = self.input_positions(self.frames(here.shard(tokens)) * self.config.hidden_size**0.5, positions)
            mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=valid.long())
            logits = here.whole(self.head(self.stack(x, mask, positions)))
        loss = None if labels is None else ctc_loss(logits, lengths, labels)
        return Transcription(loss=loss, logits=logits, lengths=lengths)

    def _tokens(self, features: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Each `subsample` frames side by side, and how many tokens of each item hold a real frame."""
        if attention_mask is None:
            attention_mask = features.new_ones(features.shape[:2], dtype=torch.long)
        if (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
            raise ValueError("an item has padding before a real frame, but its padding must come last")
        factor = self.config.subsample
        features = features.masked_fill(attention_mask[..., None] == 0, 0.0)
        features = nn.functional.pad(features, (0, 0, 0, -features.shape[1] % factor))
        return features.unflatten(1, (-1, factor)).flatten(2), -(-attention_mask.sum(1) // factor)


def ctc_loss(
    logits: Float[Tensor, "B T V"], lengths: Int[Tensor, " B"], labels: Int[Tensor, "B L"]
) -> Float[Tensor, ""]:
    """The mean over items of −ln p(labels) / number of labels; an item without labels counts −ln p(silence).

    Raises:
        ValueError: an item with more symbols, or repetitions of them (which a blank must part), than tokens.
    """
    valid = labels != PADDING
    symbols = valid.sum(1)
    repeated = ((labels[:, 1:] == labels[:, :-1]) & valid[:, 1:]).sum(1)
    short = symbols + repeated > lengths
    if short.any():
        item = int(short.nonzero()[0])
        raise ValueError(
            f"item {item} has {int(symbols[item])} symbols, {int(repeated[item])} of them repetitions, but only "
            f"{int(lengths[item])} tokens to write them with: longer inputs or a smaller subsample"
        )
    likely = logits.float().log_softmax(-1).transpose(0, 1)
    return nn.functional.ctc_loss(likely, labels.masked_fill(~valid, BLANK), lengths, symbols, blank=BLANK)


def greedy(logits: Float[Tensor, "B T V"], lengths: Int[Tensor, " B"]) -> list[list[int]]:
    """The likeliest symbol of each token, repetitions joined, blanks left out: Graves et al. 2006, best path."""
    items = zip(logits.argmax(-1).tolist(), lengths.tolist(), strict=True)
    return [[symbol for symbol, _ in groupby(path[:length]) if symbol != BLANK] for path, length in items]
