"""Fine-tune a pretrained encoder on labelled texts, with any attention in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from subquad import hf
from subquad.core import checksums as seals
from subquad.core.errors import InputError
from subquad.hf.model_files import Pooling
from subquad.research.papers.base import AGAIN
from subquad.research.training.models import Prediction
from subquad.research.training.settings import ModelSettings
from subquad.research.training.tasks.task import Batch, Item, Metrics, Splits, Task
from subquad.tools.compare.labelled_tasks import LabelledTask, Probe, load_task
from subquad.tools.models.pretrained import load


@dataclass(frozen=True, kw_only=True)
class FineTune(Task):
    """Labelled texts, and a pretrained encoder with a linear head on it.

    Attributes:
        encoder: hub id or folder; "": the encoder of the extra `demo`.
        texts: a task of `subquad compare --task` that has labels.
        examples: training and test texts together, sampled at random; 0: all.
        learn: training texts of those that are used, evenly spaced; 0: all.
        length: tokens of a text that are read.
        classes: labels that there are.
        head: file with the weights that the head starts from; "": drawn.
        held_out: one in this number of training texts is held out for validation.
    """

    name: ClassVar[str] = "fine-tune"
    summary: ClassVar[str] = "labelled texts, read by a pretrained encoder that is fine-tuned; accuracy"
    metric: ClassVar[str] = "accuracy"
    greater_is_better: ClassVar[bool] = True

    encoder: str = ""
    texts: str = "movie-reviews"
    examples: int = 0
    learn: int = 0
    length: int = 512
    classes: int = 2
    head: str = ""
    held_out: int = 10

    def splits(self, data: Path | None) -> Splits:
        """The task's training texts, without every tenth, that tenth, and its test texts."""
        pretrained, task = load(self.encoder or None), texts_of(self.texts, data, self.examples, self.learn)
        labels = sorted(set(task.labels))
        items: list[Item] = [
            {"input_ids": pretrained.wrap(pretrained.content_ids(text), self.length), "label": labels.index(label)}
            for text, label in zip(task.texts, task.labels, strict=True)
        ]
        learn, test = items[: task.train], items[task.train :]
        chosen = [item for i, item in enumerate(learn) if i % self.held_out]
        return Splits(Items(chosen), Items(learn[:: self.held_out]), Items(test))

    def model(self, settings: ModelSettings) -> Any:
        """The pretrained weights, a head that is drawn, and the method in every layer."""
        pretrained = load(self.encoder or None)
        model = PooledClassifier(pretrained.model, self.classes, pretrained.pooling)
        if self.head:
            model.head.load_state_dict(seals.load(Path(self.head), AGAIN))
        hf.swap(model, cast(str, settings.method), max_length=self.length)
        return model

    def collate(self, items: Sequence[Item]) -> Batch:
        """Padded on the right."""
        longest = max(len(item["input_ids"]) for item in items)
        ids = np.zeros((len(items), longest), dtype=np.int64)
        valid = np.zeros_like(ids)
        for row, item in enumerate(items):
            ids[row, : len(item["input_ids"])] = item["input_ids"]
            valid[row, : len(item["input_ids"])] = 1
        labels = torch.tensor([item["label"] for item in items])
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(valid), "labels": labels}

    def score(self, outputs: Any, batch: Batch) -> Tensor:
        """1 where the label is right."""
        return (outputs.logits.argmax(-1) == batch["labels"])[:, None].float()

    def metrics(self, scores: Tensor) -> Metrics:
        """The share that is right."""
        return {"accuracy": float(scores.double().mean())}


class PooledClassifier(PreTrainedModel):
    """A pretrained encoder and a linear head on its pooled last hidden states, brought to length 1.

    They are pooled as `Pretrained.embed` does: their mean, or the first one under "cls".
    """

    _supports_sdpa = True
    _supports_attention_backend = True
    accepts_loss_kwargs = False

    def __init__(self, encoder: PreTrainedModel, classes: int, pooling: Pooling):
        super().__init__(encoder.config)
        self.encoder, self.pooling = encoder, pooling
        self.head = nn.Linear(encoder.config.hidden_size, classes)
        self.all_tied_weights_keys: dict[str, str] = {}  # what `post_init` sets, which would draw new weights

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Prediction:
        """Logits (B, classes), and their cross-entropy with labels."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        pooled = hidden[:, 0] if self.pooling == "cls" else (hidden * attention_mask[..., None]).sum(1)
        logits = self.head(nn.functional.normalize(pooled, dim=-1))
        return Prediction(loss=nn.functional.cross_entropy(logits.float(), labels), logits=logits)


def texts_of(name: str, data: Path | None, examples: int, learn: int) -> LabelledTask:
    """A labelled task with `learn` of its training texts, evenly spaced, and all of its test texts."""
    task = load_task(name, data, examples or None)
    if not task.labels:
        raise InputError(f"task {name!r} has no labels to learn; take one that is scored by a probe")
    count = min(learn or task.train, task.train)
    kept = [*(i * task.train // count for i in range(count)), *range(task.train, len(task.texts))]
    texts, labels = ([column[i] for i in kept] for column in (task.texts, task.labels))
    return replace(task, texts=texts, labels=labels, examples=len(kept), train=count)


class Items(Dataset[Item]):
    """Texts as token ids, with labels."""

    def __init__(self, items: Sequence[Item]):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return self.items[index]


def head_of(probe: Probe) -> dict[str, Tensor]:
    """The probe as a linear head, a logit for each label in their order."""
    weight, bias = (torch.from_numpy(part).float() for part in probe.coefficients())
    if len(weight) == 1:  # of two labels the difference
        weight, bias = torch.cat([-weight, weight]) / 2, torch.cat([-bias, bias]) / 2
    return {"weight": weight, "bias": bias}
