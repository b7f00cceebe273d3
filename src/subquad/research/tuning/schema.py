"""The shape of what `subquad tune` writes, which its table and plots are made from."""

from dataclasses import dataclass
from typing import Any, Literal

KIND, SCHEMA = "subquad tune", 1


PLOT = "trials"  # the file with the value of each trial, without its ending


def plot_by(setting: str) -> str:
    """The file with the values of the trials against a setting, without its ending."""
    return f"by-{setting.replace('.', '-')}"


@dataclass(frozen=True)
class TriedTrial:
    """A trial that has ended; its figures are those of the validation examples."""

    number: int
    values: dict[str, str]  # of what is searched, as `--set` reads them
    state: Literal["finished", "pruned", "failed"]
    value: float | None  # of the metric; of a pruned trial the last one
    figures: dict[str, float]
    steps: int
    seconds: float
    reason: str | None  # why it failed


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """A search: its trials, the best first."""

    kind: str = KIND
    schema: int = SCHEMA
    created: str
    command: str
    task: dict[str, Any]  # name, summary, metric, and whether a greater value is better
    search: dict[str, str]  # of each setting: "linear", "log" or "choices"
    trials: list[TriedTrial]
    best: dict[str, Any]  # its number, and the command that trains it
    machine: dict[str, str]
