"""A program for processes that each have a part of the tokens: it writes down what each one finds.

torchrun --nproc-per-node 3 -m tests.research.training.split FOLDER

Models: their loss and gradients. Runs: what `train` leaves.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from subquad.research.papers import catalogue as _with_their_tasks  # noqa: F401
from subquad.research.training import trainer
from subquad.research.training.models import (
    CausalLanguageModel,
    CTCEncoder,
    EncoderClassifier,
    EncoderConfig,
    EncoderDecoderForecaster,
    EncoderForecaster,
    ForecastConfig,
    LanguageConfig,
    MaskedSymbolEncoder,
    SpeechConfig,
    splitting,
)
from subquad.research.training.run import Outcome, train
from subquad.research.training.settings import RunSettings, read_overrides, settings_of
from subquad.testing.oracle import integers, normal
from subquad.tools.runs import processes
from tests.research.training.small import without_times

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
DROPPED = {"hidden_dropout": 0.0, "initializer_range": 0.3}
TOKENS = 23


@dataclass(frozen=True)
class Model:
    """A model on a batch of two items, the second of which has fewer tokens."""

    of: Callable[[Any], torch.nn.Module]
    config: type
    settings: dict[str, Any] = field(default_factory=dict)
    padded: bool = True

    def made(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return self.of(self.config(**SIZES, **DROPPED, **self.settings)).train()

    def batch(self) -> dict[str, torch.Tensor]:
        if self.config is ForecastConfig:
            return {"past": normal(2, 19, 3), "times": normal(2, 26, 5, seed=1), "labels": normal(2, 7, 2, seed=2)}
        real = torch.arange(TOKENS) < torch.tensor([TOKENS, 6])[:, None]
        if self.config is SpeechConfig:
            labels = torch.tensor([[1, 2, 2, 3], [4, 5, -100, -100]])
            return {"features": normal(2, TOKENS, 4), "attention_mask": real.long(), "labels": labels}
        ids = (1 + integers(18, 2, TOKENS)).where(real, 0)
        batch = {"input_ids": ids} | ({"attention_mask": real.long()} if self.padded else {})
        if self.of is EncoderClassifier:
            pairs = {"pair_ids": ids[:, :11].flip(1), "pair_mask": real[:, :11].flip(1).long()}
            return batch | {"labels": torch.tensor([1, 0])} | (pairs if self.settings.get("pairs") else {})
        return batch | {"labels": ids.where(real & (ids > 3), -100)}

    def real(self) -> Any:
        """The index of the outputs that are of real tokens."""
        mask = self.batch().get("attention_mask")
        if mask is None or self.of is EncoderClassifier:
            return slice(None)
        lengths = -(-mask.sum(1) // self.settings.get("subsample", 1))
        return torch.arange(int(lengths.max())) < lengths[:, None]


def encoder(**settings: Any) -> dict[str, Any]:
    return {"vocab_size": 20, "pad_token_id": 0, "bos_token_id": 1, **settings}


FORECAST = {"channels": 3, "targets": 2, "past": 19, "label": 5, "horizon": 7}
MODELS = {
    "mean": Model(EncoderClassifier, EncoderConfig, encoder(method="i-clustered:clusters=4,topk=3")),
    "mean, no padding": Model(EncoderClassifier, EncoderConfig, encoder(method="clustered:clusters=4"), padded=False),
    "first": Model(EncoderClassifier, EncoderConfig, encoder(pooling="first", positions="learned", method="full")),
    "pairs": Model(EncoderClassifier, EncoderConfig, encoder(pairs=True, positions="sinusoidal", method="performer")),
    "masked": Model(MaskedSymbolEncoder, EncoderConfig, encoder(positions="layer-sinusoidal", method="local:window=3")),
    "language": Model(CausalLanguageModel, LanguageConfig, encoder(method="linear")),
    "language, heads": Model(CausalLanguageModel, LanguageConfig, encoder(method="full"), padded=False),
    "speech": Model(CTCEncoder, SpeechConfig, {"bands": 4, "subsample": 2, "method": "linear"}),
    "encoder-decoder": Model(
        EncoderDecoderForecaster,
        ForecastConfig,
        FORECAST | {"method": "linear", "cross_method": "clustered:clusters=3"},
    ),
    "forecaster": Model(EncoderForecaster, ForecastConfig, FORECAST | {"method": "full"}),
}


def differences(model: Model) -> float:
    """The largest relative difference of the loss, the outputs and the mean gradient from those of one process."""
    ours, theirs = model.made(), model.made()
    want = theirs(**model.batch())
    want.loss.backward()
    with splitting.over(dist.group.WORLD):
        have = ours(**model.batch())
        have.loss.backward()
        with torch.no_grad():
            outputs = ours.eval()(**model.batch()).logits
    with torch.no_grad():
        real = model.real()
        pairs = [(want.loss, have.loss), (theirs.eval()(**model.batch()).logits[real], outputs[real])]
    for (name, a), b in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            dist.all_reduce(b.grad)
            pairs.append((a.grad, b.grad / dist.get_world_size()))
    return max(float((w - h).detach().abs().max() / w.detach().abs().max().clamp(min=1e-2)) for w, h in pairs)


# ---------------------------------------------------------------------- runs

SMALL = (
    *("model.layers=1", "model.heads=2", "model.width=16", "model.feed_forward=32", "model.dropout=0"),
    *("training.steps=20", "training.batch=4", "training.every=10", "training.evaluation_batch=4"),
    *("training.learning_rate=0.003", "training.schedule=cosine", "training.warmup=0", "parallel.timeout=60"),
)
RUNS = {
    "text": ("text", "task.length=30", "model.method=i-clustered:clusters=4,topk=3", "model.positions=learned"),
    "lm": ("lm", "task.length=32", "model.method=linear", "task.limit=200", "training.accumulate=2"),
}


LONGER = ("training.schedule=constant",)  # may go on to more steps
SHORTER = (*LONGER, "training.steps=10")


def settings(name: str, folder: Path, *more: str) -> RunSettings:
    task, *own = RUNS[name]
    files = {"text": folder / "mine.csv", "lm": folder / "mine.txt"}[name]
    return settings_of(task, read_overrides([*SMALL, *own, f"task.files=['{files}']", *more]))


def write_data(folder: Path) -> None:
    """Texts of many lengths in two classes, and one long text."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away"]
    texts = [" ".join(words[i % 5 : i % 5 + 1 + i % 4]) for i in range(60)]
    rows = [f"{text},{'odd' if i % 2 else 'even'}" for i, text in enumerate(texts)]
    (folder / "mine.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    (folder / "mine.txt").write_text(" ".join(" ".join(words[i % 7 :]) for i in range(60)))


def every_step() -> None:
    """Log the loss of every step."""
    trainer.SHOWN = 1


def kept(outcome: Outcome) -> dict[str, Any]:
    return {"history": without_times(outcome.history), "test": outcome.test}


def curves(folder: Path, *how: str) -> dict[str, Any]:
    """The results of runs on these processes; the last one continues what one process left."""
    found = {name: kept(train(settings(name, folder, *how), folder / name)) for name in RUNS}
    found["of one"] = kept(train(settings("lm", folder, *how, *LONGER), folder / "of one"))
    return found


def main(folder: Path, sequence: int, fsdp: str = "false") -> None:
    every_step()
    count, found = processes.count(), {}
    if count == sequence:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        found = {name: differences(model) for name, model in MODELS.items()}
    found["curves"] = curves(folder, f"parallel.sequence={sequence}", f"parallel.fsdp={fsdp}")
    (folder / f"{processes.number()}.json").write_text(json.dumps(found))
    processes.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
