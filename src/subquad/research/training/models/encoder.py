"""Encoders of tokens: a classifier of sequences or of pairs of them, and a model of masked symbols."""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput

from subquad.research.training.models.blocks import AttentionModel, InputPositions, Prediction, Stack
from subquad.research.training.models.configuration import AttentionConfig
from subquad.research.training.models.positional_encodings import counted
from subquad.research.training.models.splitting import ModelSplit, split


@strict
class EncoderConfig(AttentionConfig):
    """An encoder of tokens.

    Attributes:
        vocab_size: symbols; 0 is padding.
        num_labels: classes, for the classifier.
        pooling: "mean" over real tokens, or "first" token.
        pairs: whether the classifier reads two sequences per item and compares what it pools of each.
    """

    model_type = "subquad-encoder"

    vocab_size: int = 258
    pad_token_id: int | None = 0
    pooling: str = "mean"
    pairs: bool = False

    def validate_architecture(self) -> None:
        """Refuse words that no model can be made of."""
        super().validate_architecture()
        if self.pooling not in ("mean", "first"):
            raise ValueError(f"pooling={self.pooling!r}, but it must be 'mean' or 'first'")


class TokenEncoder(nn.Module):
    """Embedded tokens with positions, through a stack of blocks."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.input_positions = InputPositions(config)
        self.stack = Stack(config, config.num_hidden_layers)

    def forward(self, input_ids: Int[Tensor, "B N"], attention_mask: Tensor | None) -> Float[Tensor, "B N W"]:
        """The hidden states of all tokens; where they are split over ranks, of this rank's."""
        here = split(input_ids.shape[1])
        positions, attention_mask = here.shard(counted(input_ids)), here.shard(attention_mask)
        with here.attending():
            x = self.input_positions(self.embedding(here.shard(input_ids)), positions)
            mask = create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=attention_mask)
            return self.stack(x, mask, positions)


class EncoderModel(AttentionModel):
    """The encoder of a classifier without its head; `subquad compare` and `plan` judge it by its hidden states."""

    config_class = EncoderConfig

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.encoder = TokenEncoder(config)
        self.finish()

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of the tokens."""
        return self.encoder.embedding

    def forward(self, input_ids: Int[Tensor, "B N"], attention_mask: Tensor | None = None, **_: Any) -> BaseModelOutput:
        """The hidden states of all tokens."""
        hidden = self.encoder(input_ids, attention_mask)
        return BaseModelOutput(last_hidden_state=split(input_ids.shape[1]).whole(hidden))


class EncoderClassifier(AttentionModel):
    """Classify sequences of tokens (bytes, pixels, symbols), or pairs of them.

    A pair (a, b) is classified by its pooled vectors [a, b, a∘b, a−b], as in LRA's retrieval (Tay et al. 2020).

    >>> import torch
    >>> from subquad.research.training.models import EncoderClassifier, EncoderConfig
    >>> config = EncoderConfig(vocab_size=20, num_labels=3, hidden_size=32, method="i-clustered:clusters=4")
    >>> EncoderClassifier(config)(torch.randint(1, 20, (2, 50))).logits.shape
    torch.Size([2, 3])
    """

    config_class = EncoderConfig

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.encoder = TokenEncoder(config)
        pooled = 4 * config.hidden_size if config.pairs else config.hidden_size
        self.head = nn.Sequential(
            nn.Linear(pooled, config.hidden_size), nn.GELU(), nn.Linear(config.hidden_size, config.num_labels)
        )
        self.finish()

    def forward(
        self,
        input_ids: Int[Tensor, "B N"],
        attention_mask: Tensor | None = None,
        pair_ids: Int[Tensor, "B M"] | None = None,
        pair_mask: Tensor | None = None,
        labels: Int[Tensor, " B"] | None = None,
        **_: Any,
    ) -> Prediction:
        """Logits (B, classes), and their cross-entropy with labels. `pair_ids`: the second sequences of pairs.

        Raises:
            ValueError: pairs for a model of single sequences, or the reverse.
        """
        if (pair_ids is not None) != self.config.pairs:
            made_for, wanted = ("pairs", "single sequences") if pair_ids is not None else ("single sequences", "pairs")
            raise ValueError(f"the model reads {wanted} (config.pairs={self.config.pairs}), but {made_for} were given")
        pooled = self._pool(input_ids, attention_mask)
        if pair_ids is not None:
            other = self._pool(pair_ids, pair_mask)
            pooled = torch.cat([pooled, other, pooled * other, pooled - other], dim=-1)
        logits = self.head(pooled)
        loss = None if labels is None else nn.functional.cross_entropy(logits.float(), labels)
        return Prediction(loss=loss, logits=logits)

    def _pool(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        hidden, here = self.encoder(input_ids, attention_mask), split(input_ids.shape[1])
        if self.config.pooling == "first":
            return here.first(hidden)
        if attention_mask is None:
            return here.mean(hidden)
        valid = attention_mask.bool()[..., None]
        return here.sum(hidden.masked_fill(~here.shard(valid), 0.0).sum(1)) / valid.sum(1).clamp(min=1)


class MaskedSymbolEncoder(AttentionModel):
    """Predict the symbol at each position; the loss is over the positions with a label that is not −100.

    Each item's places count the same, and then each item, so that a batch can be split among processes.
    """

    config_class = EncoderConfig

    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.encoder = TokenEncoder(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.finish()

    def forward(
        self,
        input_ids: Int[Tensor, "B N"],
        attention_mask: Tensor | None = None,
        labels: Int[Tensor, "B N"] | None = None,
        **_: Any,
    ) -> Prediction:
        """Logits (B, N, symbols), and the mean over items of their mean cross-entropy with labels."""
        logits, here = self.head(self.encoder(input_ids, attention_mask)), split(input_ids.shape[1])
        loss = None if labels is None else per_item_loss(logits, labels, here)
        return Prediction(loss=loss, logits=logits if self.training else here.whole(logits))


def per_item_loss(logits: Float[Tensor, "B _n V"], labels: Int[Tensor, "B N"], here: ModelSplit) -> Float[Tensor, ""]:
    """The mean over items of the mean cross-entropy of each one's places; label −100: not a place.

    `labels` are those of all tokens, `logits` those of this rank's.
    """
    nats, _ = item_losses(logits, here.shard(labels))
    counts = (labels != -100).sum(1)
    return (here.sum(nats) / counts.clamp(min=1)).mean()


def item_losses(
    logits: Float[Tensor, "B N V"], labels: Int[Tensor, "B N"]
) -> tuple[Float[Tensor, " B"], Int[Tensor, " B"]]:
    """For each item, the sum of the cross-entropies of its places in nats, and its number of places."""
    each = nn.functional.cross_entropy(logits.transpose(1, 2).float(), labels, ignore_index=-100, reduction="none")
    return each.sum(1), (labels != -100).sum(1)
