"""Next symbols from counts: interpolated n-grams, the baseline of every sequence model.

    p_k(x | c) = (count(c, x) + kinds(c) · p_{k−1}(x | c')) / (count(c) + kinds(c))

with c the k symbols before, c' those without the first of them, kinds(c) how many different symbols follow c, and
p_{−1} uniform: Witten and Bell 1991, method C, as Chen and Goodman 1998 write it. Contexts that were never seen change
nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from subquad.research.training.tasks.windows import Symbols


def ngram_bits(train: Sequence[Symbols], test: Sequence[Symbols], predicted: int, order: int) -> list[float]:
    """Bits a symbol of the test sequences, with contexts of 0, 1, …, `order` symbols.

    The first of a sequence marks its start, and is not counted; nor are symbols from `predicted` on.
    """
    base = 1 + max(int(sequence.max()) for sequence in [*train, *test])
    assert base ** (order + 1) < 2**63
    probability: NDArray[np.float64] | float = 1 / predicted
    bits = []
    for k in range(order + 1):
        known, asked = _codes(train, k, base, predicted), _codes(test, k, base, predicted)
        grams, counts = np.unique(known, return_counts=True)
        contexts, first, kinds = np.unique(grams // base, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        count = _looked_up(grams, counts, asked)
        total, other = (_looked_up(contexts, values, asked // base) for values in (totals, kinds))
        probability = np.where(total > 0, (count + other * probability) / np.maximum(total + other, 1), probability)
        bits.append(float(-np.log2(probability).mean()))
    return bits


def _codes(sequences: Sequence[Symbols], k: int, base: int, predicted: int) -> NDArray[np.int64]:
    """Each counted symbol with the k before it, as one number; more of the first symbol precede the start."""
    codes = []
    for sequence in sequences:
        padded = np.concatenate([np.repeat(sequence[:1], k), sequence]).astype(np.int64)
        code = np.zeros(len(sequence) - 1, dtype=np.int64)
        for i in range(1, k + 2):
            code = code * base + padded[i : i + len(code)]
        codes.append(code[sequence[1:] < predicted])
    return np.concatenate(codes)


def _looked_up(keys: NDArray[np.int64], values: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values of sorted keys; 0 where there is no such key."""
    index = np.searchsorted(keys, asked).clip(max=len(keys) - 1)
    return np.where(keys[index] == asked, values[index], 0)
