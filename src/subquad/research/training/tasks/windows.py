"""Long sequences of symbols, read in windows: each symbol once, or windows drawn at random."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from subquad.research.training.tasks.task import Batch, Item

Symbols = NDArray[np.int16]


class Windows(Dataset[Item]):
    """Windows of at most `length` symbols, one after the other, in each of which all but the first are predicted.

    The last symbol of a window is the first of the next, so that each symbol is predicted once, but for the first of a
    sequence, which marks its start.
    """

    def __init__(self, sequences: Sequence[Symbols], length: int):
        self.sequences, self.length = sequences, length
        counts = [-(-(len(sequence) - 1) // (length - 1)) for sequence in sequences]
        self.ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        number = int(np.searchsorted(self.ends, index, side="right"))
        before = int(self.ends[number - 1]) if number else 0
        start = (index - before) * (self.length - 1)
        return {"symbols": self.sequences[number][start : start + self.length]}

    def contents_to_compare(self) -> Iterator[memoryview]:
        """All sequences."""
        return (sequence.data for sequence in self.sequences)


class DrawnWindows(Dataset[Item]):
    """Windows at random places, evenly over all of them: item i is drawn from the seed and i."""

    def __init__(self, sequences: Sequence[Symbols], length: int, count: int, seed: int):
        self.sequences, self.length, self.count, self.seed = sequences, length, count, seed
        starts = [max(1, len(sequence) - length + 1) for sequence in sequences]
        self.ends = np.cumsum(starts)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        window = int(np.random.default_rng((self.seed, index)).integers(self.ends[-1]))
        number = int(np.searchsorted(self.ends, window, side="right"))
        start = window - (int(self.ends[number - 1]) if number else 0)
        return {"symbols": self.sequences[number][start : start + self.length]}

    def contents_to_compare(self) -> Iterator[memoryview]:
        """All sequences."""
        return (sequence.data for sequence in self.sequences)


def with_start(symbols: NDArray[Any], start: int) -> Symbols:
    """A sequence after the symbol that marks its start."""
    return np.concatenate([[start], symbols]).astype(np.int16)


def first(sequences: Sequence[Symbols], limit: int) -> list[Symbols]:
    """The first sequences, up to `limit` symbols in total; 0 means all of them."""
    if not limit:
        return list(sequences)
    kept, left = [], limit
    for sequence in sequences:
        kept += [sequence[: left + 1]] if left > 0 else []
        left -= len(sequence) - 1
    return kept


def batch_of(items: Sequence[Item], padding: int, predicted: int) -> Batch:
    """Windows as a batch, padded on the right; labels of symbols from `predicted` on, and of padding, are −100."""
    windows = [torch.from_numpy(item["symbols"].astype(np.int64)) for item in items]
    ids = pad_sequence(windows, batch_first=True, padding_value=padding)
    batch, valid = {"input_ids": ids, "labels": ids.where(ids < predicted, -100)}, ids != padding
    return batch if bool(valid.all()) else batch | {"attention_mask": valid.long()}
