"""The order in which examples are learned from, for a whole run."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class Order(Sampler[int]):
    """Examples one after the other: pass after pass through all of them, each in an order drawn from seed and pass.

    To Trainer the run is one epoch of `length` examples. So a batch never is smaller at the end of a pass, batches do
    not depend on the number of processes or of accumulated passes, and a run that goes on skips what it has seen.
    """

    def __init__(self, examples: int, length: int, seed: int):
        self.examples, self.length, self.seed = examples, length, seed

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for done in range(0, self.length, self.examples):
            order = np.random.default_rng((self.seed, done // self.examples)).permutation(self.examples)
            yield from map(int, order[: self.length - done])
