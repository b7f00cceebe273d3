"""Masked copy (Vyas et al. 2020, appendix C.2): w occurs twice, differently masked; predict the masked symbols."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.models.encoder import EncoderConfig, MaskedSymbolEncoder
from subquad.research.training.tasks.task import Batch, Item, Metrics, Splits, Task


@dataclass(frozen=True, kw_only=True)
class MaskedCopy(Task):
    """Predict the masked symbols of 0w0w, where w has `length` symbols and 0 is a separator.

    Some symbols of each half are masked, but never both copies of a symbol, so every masked symbol can be copied.

    Attributes:
        length: number L of symbols in w; the input has 2L + 2 tokens. Vyas et al. (2020) use 31, 63, 127
            and 255.
        symbols: number of different symbols.
        masked: share of the tokens of 0w0w that are masked.
        examples: number of training examples, which are made as they are read; validation and test have 512 each.
        seed: random seed of the examples.
    """

    name: ClassVar[str] = "masked-copy"
    summary: ClassVar[str] = (
        "a sequence that is repeated once, masked at different positions; accuracy of the masked symbols"
    )
    metric: ClassVar[str] = "accuracy"
    greater_is_better: ClassVar[bool] = True
    start: ClassVar = {
        "model": {"layers": 4, "heads": 6, "width": 192, "feed_forward": 768, "dropout": 0.0, "positions": "learned"},
        "training": {"steps": 5000, "batch": 32, "learning_rate": 2e-4, "optimizer": "radam", "schedule": "constant"},
    }

    length: int = 127
    symbols: int = 10
    masked: float = 0.2
    examples: int = 1_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 2 or self.symbols < 2:
            raise ValueError(f"length={self.length} and symbols={self.symbols} must be at least 2")
        if not 0.0 < self.masked <= 0.5:
            raise ValueError(
                f"masked={self.masked}, but both halves are masked in different places: more than 0, to 0.5"
            )

    @property
    def separator(self) -> int:
        """The token 0 of the paper; symbols are 1, 2, …, and 0 is padding here."""
        return self.symbols + 1

    @property
    def mask(self) -> int:
        """The token M."""
        return self.symbols + 2

    def splits(self, data: Path | None = None) -> Splits:
        """Examples made from the seed; nothing is read."""
        return Splits(Copies(self, 0, self.examples), Copies(self, 1, 512), Copies(self, 2, 512))

    def model(self, settings: ModelSettings) -> MaskedSymbolEncoder:
        """An encoder with a symbol for each place."""
        longest = 2 * self.length + 2
        config = settings.config(EncoderConfig, longest=longest, vocab_size=self.mask + 1)
        return MaskedSymbolEncoder(config)

    def collate(self, items: Sequence[Item]) -> Batch:
        """All items are of one length."""
        return {name: torch.from_numpy(np.stack([item[name] for item in items])) for name in items[0]}

    def score(self, outputs: Any, batch: Batch) -> Tensor:
        """The numbers of correct and of all masked positions, for each item."""
        asked = batch["labels"] != -100
        right = (outputs.logits.argmax(-1) == batch["labels"]) & asked
        return torch.stack([right.sum(1), asked.sum(1)], dim=1).float()

    def metrics(self, scores: Tensor) -> Metrics:
        """The share of masked places that are right."""
        right, asked = scores.double().sum(0).tolist()
        return {"accuracy": right / asked}

    def baselines(self, splits: Splits, data: Path | None = None) -> dict[str, Metrics]:
        """The baseline is a random guess, whose accuracy is 1 / `symbols`."""
        return {"guess": {"accuracy": 1 / self.symbols}}


class Copies(Dataset[Item]):
    """Item i of a split, made from the seed, the split and i."""

    def __init__(self, task: MaskedCopy, split: int, count: int):
        self.task, self.split, self.count = task, split, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        task = self.task
        draw = np.random.default_rng((task.seed, self.split, index))
        word = draw.integers(1, task.symbols + 1, task.length)
        count = max(1, round(task.masked * task.length))
        order = draw.permutation(task.length)
        whole = np.concatenate([[task.separator], word, [task.separator], word])
        hidden = np.zeros(len(whole), dtype=bool)
        hidden[1 + order[:count]] = True
        hidden[task.length + 2 + order[count : 2 * count]] = True
        return {
            "input_ids": np.where(hidden, task.mask, whole),
            "labels": np.where(hidden, whole, -100),
        }
