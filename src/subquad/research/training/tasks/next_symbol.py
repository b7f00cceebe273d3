"""Shared parts of tasks in which a causal language model predicts the next symbol of long sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from subquad.core.errors import check_least
from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.models.language import CausalLanguageModel, LanguageConfig, next_symbol_losses
from subquad.research.training.tasks.task import Batch, Item, Splits, Task
from subquad.research.training.tasks.windows import DrawnWindows, Symbols, Windows, batch_of, first


@dataclass(frozen=True, kw_only=True)
class NextSymbol(Task):
    """Windows of sequences: drawn at random to learn from; to choose by and to report on, each symbol once."""

    greater_is_better: ClassVar[bool] = False
    symbols: ClassVar[int]  # kinds; the number after them marks the start of a sequence, the next is padding
    predicted: ClassVar[int]  # the number of symbols to predict, from the first on

    length: int = 512
    examples: int = 1_000_000
    limit: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, length=2, examples=1, limit=0, seed=0)

    @property
    def start_symbol(self) -> int:
        """Stands before the first symbol of each sequence."""
        return self.symbols

    def windows(self, train: Sequence[Symbols], validation: Sequence[Symbols], test: Sequence[Symbols]) -> Splits:
        """The sequences in windows; of the latter two the first `limit` symbols, where there is a limit."""
        drawn = DrawnWindows(train, self.length, self.examples, self.seed)
        return Splits(drawn, *(Windows(first(part, self.limit), self.length) for part in (validation, test)))

    def model(self, settings: ModelSettings) -> CausalLanguageModel:
        """A causal language model of these symbols."""
        tokens = {"bos_token_id": self.symbols, "pad_token_id": self.symbols + 1, "vocab_size": self.symbols + 2}
        return CausalLanguageModel(settings.config(LanguageConfig, longest=self.length, **tokens))

    def collate(self, items: Sequence[Item]) -> Batch:
        """Windows, padded on the right where they end with their sequence."""
        return batch_of(items, self.symbols + 1, self.predicted)

    def score(self, outputs: Any, batch: Batch) -> Tensor:
        """The nats of the predicted symbols, and their number."""
        nats, count = next_symbol_losses(outputs.logits, batch["labels"])
        return torch.stack([nats, count], dim=1)
