"""The definition of a task: data, a model for it, a metric, and the baselines to compare any model with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from subquad.core.spelling import listed

NAMED = 3  # files that a title names
Item = dict[str, Any]  # one example, as plain arrays and numbers
Batch = dict[str, Tensor]  # what a model's forward takes
Metrics = dict[str, float]  # a metric's name and its value


def several(texts: Sequence[str]) -> Sequence[str]:
    """The texts; TypeError for a single one, whose letters would pass for texts."""
    if isinstance(texts, str):
        raise TypeError("several texts are expected, but this is one: write encode([text])")
    return texts


@dataclass(frozen=True)
class Splits:
    """Examples to learn from, to choose by, and to report on. Map-style: item i is the same every time.

    A dataset whose items are cut from data in memory may define `contents_to_compare`, which yields this data in parts,
    as bytes: a run is not continued if any of it changed. Of other datasets, some items are compared.
    """

    train: Dataset[Item]
    validation: Dataset[Item]
    test: Dataset[Item]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A task: a frozen dataclass whose fields are its settings.

    A subclass gives the class variables and the methods below. Whatever it draws depends on its settings and on the
    item's number alone, so that runs resume, and processes share the data, exactly.
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line: what is read, what is predicted, what is measured
    summary_of_files: ClassVar[str] = ""  # the same of the user's own {files}, for a task that has `files`
    metric: ClassVar[str]  # the one of `figures` that the best model is chosen by
    greater_is_better: ClassVar[bool]
    needs: ClassVar[str | None] = None  # the folder of real data, under the data directory
    pipeline: ClassVar[str | None] = None  # the pipeline of transformers for a trained model with its tokenizer
    start: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # defaults for "model" and "training" that suit the task

    @abstractmethod
    def splits(self, data: Path | None) -> Splits:
        """The examples; `data` is the folder of real data, which has `needs` in it.

        Raises:
            InputError: data that is missing or malformed.
        """

    @abstractmethod
    def model(self, settings: Any) -> PreTrainedModel:
        """A new model for the task, its weights drawn from torch's generator; its settings are `ModelSettings`."""

    def outline(self, settings: Any) -> PreTrainedModel:
        """The model with exact attention and without storage, for what its layers are."""
        with torch.device("meta"):
            return self.model(replace(settings, method="full"))

    def to_dict(self) -> dict[str, Any]:
        """The settings of the task."""
        return asdict(self)

    @property
    def title(self) -> str:
        """One line: what this run reads, predicts and measures; it names the user's own files."""
        chosen_files: Sequence[str] | str = getattr(self, "files", ())
        names = [
            Path(file).name for file in ([chosen_files] if isinstance(chosen_files, str) else chosen_files) if file
        ]
        if len(names) > NAMED:
            names[NAMED:] = [f"{len(names) - NAMED} more"]
        return self.summary_of_files.format(files=listed(names)) if names and self.summary_of_files else self.summary

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that makes text the input of a trained model; None where the task reads no text."""
        return None

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        """Write a trained model into a folder, with its tokenizer where the task has one."""
        model.save_pretrained(folder)
        if (tokenizer := self.tokenizer) is not None:
            tokenizer.save_pretrained(folder)

    @abstractmethod
    def collate(self, items: Sequence[Item]) -> Batch:
        """Items as one padded batch."""

    @abstractmethod
    def score(self, outputs: Any, batch: Batch) -> Float[Tensor, "B S"]:
        """Return S numbers of each item for `metrics`, such as how many places were right, and out of how many."""

    @abstractmethod
    def metrics(self, scores: Float[Tensor, "items S"]) -> Metrics:
        """The metrics, of the scores of all items."""

    def notes(self, splits: Splits) -> list[str]:
        """Lines that a user should read before training, such as how much of the data the settings leave out."""
        return []

    def baselines(self, splits: Splits, data: Path | None) -> dict[str, Metrics]:
        """The metrics reached without attention or without learning, on the test examples: {name: figures}."""
        return {}
