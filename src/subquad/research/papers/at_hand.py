"""The pretrained model and the data that an experiment is given, and what is calibrated on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad import hf
from subquad.core.errors import InputError
from subquad.methods import parse_method
from subquad.research.papers.base import Context
from subquad.research.papers.random_encoder import write_random_encoder
from subquad.tools.calibrate.run import fit, mean_at, save
from subquad.tools.calibrate.settings import CalibrateSettings
from subquad.tools.data.texts import read_documents
from subquad.tools.models.compare_rows import CompareRow, row_of_adapter
from subquad.tools.models.pretrained import Pretrained, load

RANDOM = "random"  # the model of smoke runs
ADAPTER = "adapter"  # what a cell that calibrates leaves in its folder


@dataclass(frozen=True)
class AtHand:
    """A model by hub id or folder (None: the encoder of the extra `demo`), and the folder of data."""

    model: str | None
    data: Path | None

    def load(self, device: str) -> Pretrained:
        """The model with its tokenizer; it must be an encoder whose hidden states are read."""
        pretrained = load(self.model, device)
        if pretrained.kind != "embedding":
            raise InputError(f"{pretrained.name} is a {pretrained.kind}, but this experiment reads embedding models")
        return pretrained

    def texts(self, files: Sequence[str]) -> list[Path]:
        """Files of plain text under the data folder; a whole path stays what it is."""
        if self.data is None:
            raise InputError(
                f"this experiment reads {', '.join(files)}: --data-dir FOLDER, or the environment variable SUBQUAD_DATA"
            )
        return [self.data / file for file in files]


def folders(model: str, tasks: Sequence[str], files: Sequence[str] = ()) -> list[str]:
    """The folders of data that an experiment reads: those of its tasks and of its text; none with made-up data."""
    if model == RANDOM:
        return []
    named = [task.replace("-", "_") for task in tasks] + [Path(file).parts[0] for file in files]
    return list(dict.fromkeys(named))


def at_hand(model: str, context: Context) -> AtHand:
    """The model and data by name: "" is the encoder of the extra `demo`, "random" a small one with its own data."""
    if model != RANDOM:
        return AtHand(model or None, context.data)
    folder = context.shared("random encoder", write_random_encoder)
    return AtHand(str(folder / "model"), folder / "data")


def calibrate(
    at: AtHand, method: str, files: Sequence[str], context: Context, *, steps: int, length: int, seed: int = 0
) -> dict[str, Any]:
    """Fit a method's learned parameters to the model and leave the adapter in the cell's folder.

    `steps` 0: the method's own recipe. Gives the means over the layers, on held-out passages, at the start and with
    the parameters that are kept: of the share of exact attention on the chosen keys, or of the error of the outputs.
    """
    folder = context.folder / ADAPTER
    if not (folder / "adapter.json").exists():
        text = tuple(at.texts(files))
        asked = CalibrateSettings(
            method, text, steps=steps or None, max_length=length, seed=seed, device=context.device
        )
        documents = read_documents(text)
        save(
            fit(asked, parse_method(method), at.load(context.device), documents, context.folder, context.progress),
            folder,
        )
    record = hf.read_adapter(folder).record
    return {"metric": record["metric"], "steps": record["history"][-1]["step"], "seconds": record["seconds"]} | _gain(
        record
    )


def _gain(record: dict[str, Any]) -> dict[str, float]:
    """The mean of the layers' figures at the start, and at the step that each layer keeps."""
    metric, history = record["metric"], record["history"]
    by_step = {entry["step"]: entry["layers"] for entry in history}
    kept = [by_step[step][layer][metric] for layer, step in record["best"].items()]
    return {"start": mean_at(history[0], metric), "kept": sum(kept) / len(kept)}


def calibrated_row(pretrained: Pretrained, key: str, context: Context) -> CompareRow:
    """The row of what the cell with this key fitted."""
    return row_of_adapter(pretrained, context.beside(key) / ADAPTER)
