"""The settings of `subquad calibrate`, with their options on the command line."""

from dataclasses import dataclass
from pathlib import Path

from subquad.tools.runs import common_options as common
from subquad.tools.runs.options import option

LEARNED = (  # fitted by default, by commands that are given text to calibrate methods on
    "lha:buckets=4",
    "lha-tail",
    "tilted-pool",
    "learned-feature-map",
    "tilted-pool:pools=0",  # the window and the sinks that those two have, alone: nothing to fit
    "linformer",
)


@dataclass(frozen=True)
class CalibrateSettings:
    """The settings of `calibrate`: what to fit, on what, and how long."""

    method: str = option("lha-tail", 'A method with learned parameters, as "name:setting=value,…".')
    text: tuple[Path, ...] = option((), "Plain text to fit on: file, folder, .jsonl, .csv; repeatable.")
    model: str | None = option(None, **common.MODEL)
    column: str = option("text", common.COLUMN)
    steps: int | None = option(None, "Maximum number of steps; default: the method's own recipe.")
    max_length: int | None = option(None, "Tokens per passage; default: the model's positions, at most 512.")
    batch: int = option(1, "Passages per step.")
    held_out: int = 4  # passages
    seed: int = option(0, "Random seed for passage order and the held-out split.")
    device: str = option("cpu", common.DEVICE)
