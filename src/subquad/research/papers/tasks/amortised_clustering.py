"""Amortised clustering (Lee et al. 2019, section 5.3): from a set of points to the mixture of Gaussians behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from subquad.core.errors import check_least
from subquad.research.training.model_settings import ModelSettings
from subquad.research.training.models.mixture_model import MixtureModel, SetConfig, set_log_likelihood
from subquad.research.training.tasks.task import Batch, Item, Metrics, Splits, Task


@dataclass(frozen=True, kw_only=True)
class Clusters(Task):
    """Predict the parameters of the mixture of Gaussians that the points of a set are drawn from.

    The metric is the mean log-likelihood of a point in the predicted mixture, in nats. The weights of
    the Gaussians are drawn from a Dirichlet distribution with all parameters 1, and their centres uniformly from a
    cube (a square in two dimensions).

    Attributes:
        components: number of Gaussians.
        dimensions: width of the points.
        smallest: least number of points of a set.
        largest: greatest number of points of a set.
        reach: centres are drawn evenly from −reach to reach in each dimension.
        deviation: standard deviation of the Gaussians.
        points: learned points of each attention block on the points (ISAB); 0 means attention among all (SAB).
        decoder_layers: number of attention blocks on what is pooled.
        examples: number of training sets, which are made as they are read.
        held_out: number of validation sets, and of test sets.
        seed: random seed of the sets.
    """

    name: ClassVar[str] = "clusters"
    summary: ClassVar[str] = "the mixture of Gaussians that a set of points is drawn from; log-likelihood per point"
    metric: ClassVar[str] = "log_likelihood"
    greater_is_better: ClassVar[bool] = True
    start: ClassVar = {
        "model": {"layers": 2, "heads": 4, "width": 128, "feed_forward": 128, "dropout": 0.0, "positions": "none"},
        "training": {"steps": 5000, "batch": 10, "learning_rate": 1e-3, "optimizer": "adam", "schedule": "cosine"},
    }

    components: int = 4
    dimensions: int = 2
    smallest: int = 100
    largest: int = 500
    reach: float = 4.0
    deviation: float = 0.3
    points: int = 32
    decoder_layers: int = 1
    examples: int = 1_000_000
    held_out: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, components=1, dimensions=1, smallest=1, points=0, decoder_layers=0, examples=1, held_out=1)
        check_least(self, seed=0)
        if self.largest < self.smallest:
            raise ValueError(f"largest={self.largest}, but it must be at least smallest={self.smallest}")
        if self.deviation <= 0.0 or self.reach <= 0.0:
            raise ValueError(f"deviation={self.deviation} and reach={self.reach} must be more than 0")

    def splits(self, data: Path | None = None) -> Splits:
        """Sets made from the seed; nothing is read."""
        counts = (self.examples, self.held_out, self.held_out)
        return Splits(*(MadeSets(self, split, count) for split, count in enumerate(counts)))

    def model(self, settings: ModelSettings) -> MixtureModel:
        """A Set Transformer with one output for each component."""
        sizes = {name: getattr(self, name) for name in ("dimensions", "components", "points", "decoder_layers")}
        return MixtureModel(settings.config(SetConfig, longest=self.largest, **sizes))

    def collate(self, items: Sequence[Item]) -> Batch:
        """Sets, padded to the largest of the batch."""
        values = [torch.from_numpy(item["values"]) for item in items]
        return {
            "values": pad_sequence(values, batch_first=True),
            "sizes": torch.tensor([len(each) for each in values]),
        }

    def score(self, outputs: Any, batch: Batch) -> Tensor:
        """The log-likelihood of each set, per point."""
        return outputs.log_likelihood[:, None]

    def metrics(self, scores: Tensor) -> Metrics:
        """The mean over the sets."""
        return {"log_likelihood": float(scores.double().mean())}

    def baselines(self, splits: Splits, data: Path | None = None) -> dict[str, Metrics]:
        """The baselines are the mixture that the points were drawn from (the oracle), EM, and a single Gaussian.

        EM (expectation maximisation) starts from the centres of k-means. EM and the single Gaussian are fitted to each
        test set, so they can exceed the oracle.
        """
        test = [splits.test[number] for number in range(self.held_out)]
        rows = {
            "oracle": [_oracle(item, self.deviation) for item in test],
            "k-means and EM": [_fitted(item["values"], self.components, self.seed) for item in test],
            "one Gaussian": [_fitted(item["values"], 1, self.seed) for item in test],
        }
        return {name: {"log_likelihood": float(np.mean(values))} for name, values in rows.items()}


class MadeSets(Dataset[Item]):
    """Set i of a split, made from the seed, the split and i."""

    def __init__(self, task: Clusters, split: int, count: int):
        self.task, self.split, self.count = task, split, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        task = self.task
        draw = np.random.default_rng((task.seed, self.split, index))
        size = draw.integers(task.smallest, task.largest + 1)
        shares = draw.dirichlet(np.ones(task.components))
        centres = draw.uniform(-task.reach, task.reach, (task.components, task.dimensions))
        labels = draw.choice(task.components, size, p=shares)
        values = centres[labels] + task.deviation * draw.standard_normal((size, task.dimensions))
        return {"values": values.astype(np.float32), "shares": shares, "centres": centres}


def _oracle(item: Item, deviation: float) -> float:
    values, shares, centres = (torch.from_numpy(item[name]).double()[None] for name in ("values", "shares", "centres"))
    sizes = torch.tensor([values.shape[1]])
    return float(set_log_likelihood(values, sizes, shares.log(), centres, torch.full_like(centres, deviation)))


def _fitted(values: np.ndarray, components: int, seed: int) -> float:
    from sklearn.mixture import GaussianMixture

    components = min(components, len(values))
    return float(GaussianMixture(components, covariance_type="diag", random_state=seed).fit(values).score(values))
