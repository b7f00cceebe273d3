"""ListOps, as LRA makes it, of any length: the value of nested lists of digits under MIN, MAX, MED and SM."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from subquad.research.papers.data.listops_expressions import (
    MIN,
    OPERATORS,
    SYMBOLS,
    Rules,
    Symbols,
    apply,
    depth_of,
    evaluate,
    expression,
    root_digits,
)
from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.models.encoder import EncoderClassifier
from subquad.research.training.tasks.classification import FIRST, Classification
from subquad.research.training.tasks.task import Batch, Item, Metrics, Splits

READ = 2000  # training examples that the baselines learn from
TO_BEAT = "root and its digits"
Solved = tuple[Symbols, int]


@dataclass(frozen=True, kw_only=True)
class ListOps(Classification):
    """Predict the value, from 0 to 9, of an expression such as `[MAX 4 [MIN 2 3 ] 1 0 ]`.

    A guess from the outermost list alone, which ignores the lists inside it, is already good at LRA's lengths. So a
    model has learned to read nested lists only if it is better than this baseline.

    Attributes:
        shortest, longest: smallest and largest number of tokens. LRA has more than 500 and fewer than 2,000.
        depth: number of levels of nesting, including the level of the digits.
        arguments: largest number of arguments of an operator; the smallest is 2.
        operators: probability of an operator in place of a digit.
        examples: number of training examples, which are made as they are read. LRA has 96,000.
        held_out: number of validation examples, and of test examples. LRA has 2,000 of each.
        seed: random seed of the examples.
    """

    name: ClassVar[str] = "listops"
    summary: ClassVar[str] = "nested lists of digits under MIN, MAX, MED and SM; accuracy of the value"
    start: ClassVar = {
        "model": {"layers": 4, "heads": 4, "width": 128, "feed_forward": 256, "dropout": 0.0},
        "training": {"steps": 5000, "batch": 32, "warmup": 200, "schedule": "cosine", "every": 500},
    }

    shortest: int = 501
    longest: int = 1999
    depth: int = 10
    arguments: int = 10
    operators: float = 0.25
    examples: int = 96_000
    held_out: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("examples", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, but it must be at least 1")
        expression(self.rules, np.random.default_rng(0))  # refuses what cannot be drawn

    @property
    def rules(self) -> Rules:
        """The parameters of the random expressions."""
        return Rules(
            shortest=self.shortest,
            longest=self.longest,
            depth=self.depth,
            arguments=self.arguments,
            operators=self.operators,
        )

    def splits(self, data: Path | None = None) -> Splits:
        """Expressions made from the seed; nothing is read."""
        sizes = (self.examples, self.held_out, self.held_out)
        return Splits(*(Expressions(self, split, size) for split, size in enumerate(sizes)))

    def model(self, settings: ModelSettings) -> EncoderClassifier:
        """An encoder of the 15 symbols."""
        return self.classifier(settings, [str(digit) for digit in range(10)], len(SYMBOLS), self.longest)

    def score(self, outputs: Any, batch: Batch) -> Tensor:
        """Return for each item whether the value is right, the outermost operator, and the depth."""
        symbols = [[t - FIRST for t in row if t >= FIRST] for row in batch["input_ids"].tolist()]
        what = [[row[0] - MIN, depth_of(row)] for row in symbols]
        right = super().score(outputs, batch)
        return torch.cat([right, torch.tensor(what, dtype=right.dtype, device=right.device)], dim=1)

    def metrics(self, scores: Tensor) -> Metrics:
        """The share that is right: of all, by outermost operator, by depth."""
        right, root, depth = scores.double().unbind(1)
        values = {"accuracy": float(right.mean())}
        for number, name in enumerate(OPERATORS):
            if bool((root == number).any()):
                values[f"accuracy_{name}"] = float(right[root == number].mean())
        for level in depth.unique().int().tolist():
            values[f"accuracy_depth_{level}"] = float(right[depth == level].mean())
        return values

    def baselines(self, splits: Splits, data: Path | None = None) -> dict[str, Metrics]:
        """Each of the three baselines guesses the value that is most frequent among some expressions in training. The
        first counts all expressions, and the second those with the same outermost operator. The third applies
        this operator only to the digits that are directly in its list, not to the lists inside it, and counts those
        expressions of the second in which this gives the same result."""
        train, test = splits.train, splits.test
        assert isinstance(train, Expressions)
        assert isinstance(test, Expressions)
        known, asked = (
            [(symbols, evaluate(symbols)) for symbols in map(part.expression, range(count))]
            for part, count in ((train, min(len(train), READ)), (test, len(test)))
        )
        rules: dict[str, Callable[[Symbols], Hashable]] = {
            "majority class": lambda symbols: None,
            "root operator": lambda symbols: symbols[0],
            TO_BEAT: lambda symbols: (symbols[0], _of_digits(symbols)),
        }
        return {name: self._guesses(rule, known, asked) for name, rule in rules.items()}

    def _guesses(
        self, what: Callable[[Symbols], Hashable], known: Sequence[Solved], asked: Sequence[Solved]
    ) -> Metrics:
        """The figures of the value that is most frequent, in training, where the same is seen of an expression."""
        counts: defaultdict[Hashable, Counter[int]] = defaultdict(Counter)
        for symbols, value in known:
            counts[what(symbols)][value] += 1
        overall = sum(counts.values(), Counter())
        rows = []
        for symbols, value in asked:
            guess = (counts.get(what(symbols)) or overall).most_common(1)[0][0]
            rows.append([guess == value, symbols[0] - MIN, depth_of(symbols)])
        return self.metrics(torch.tensor(rows, dtype=torch.float64))


class Expressions(Dataset[Item]):
    """Expression i of a split, made from the seed, the split and i."""

    def __init__(self, task: ListOps, split: int, count: int):
        self.task, self.split, self.count = task, split, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        symbols = self.expression(index)
        return {"input_ids": self.task.tokens(symbols), "labels": evaluate(symbols)}

    def expression(self, index: int) -> Symbols:
        """The symbols alone."""
        return expression(self.task.rules, np.random.default_rng((self.task.seed, self.split, index)))


def solves(accuracy: float, baselines: dict[str, Metrics], items: int) -> bool:
    """Tell whether a model beats the outermost operator and its digits by more than two standard errors."""
    bar = baselines[TO_BEAT]["accuracy"]
    return accuracy > bar + 2 * (bar * (1 - bar) / items) ** 0.5


def _of_digits(symbols: Symbols) -> int | None:
    digits = root_digits(symbols)
    return apply(symbols[0], digits) if digits else None
