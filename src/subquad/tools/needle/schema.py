"""The shape of `report.json` of `subquad needle`, which its tables and plots are made from."""

from dataclasses import dataclass
from typing import Any, Literal

KIND, SCHEMA = "subquad needle", 1

Role = Literal["exact", "measured", "oracle"]


@dataclass(frozen=True)
class NeedleCell:
    """The prompts of one task with one length and depth, through one method."""

    task: str
    length: int
    depth: float | None  # None: the facts are all over the text
    samples: int
    log_likelihood: float | None  # of the answers, in nats per token: mean over the samples; None: not finite
    difference: float | None  # to exact attention on the same prompts; 0 for exact attention itself
    right: float  # share of the prompts that greedy decoding answers correctly
    differences: list[float] | None = None  # of each prompt; None: one is not finite, or they were not stored
    interval: list[float] | None = None  # 95 % interval of the difference; None: of one prompt, or not finite
    right_interval: list[float] | None = None  # 95 % interval of the share; None: it was not stored


@dataclass(frozen=True)
class NeedleMethod:
    """One method, or the oracle."""

    method: str
    role: Role
    settings: dict[str, Any]  # Method.to_dict(); of the oracle, its keys by length
    cells: list[NeedleCell]


@dataclass(frozen=True, kw_only=True)
class NeedleReport:
    """All of `report.json`."""

    kind: str = KIND
    schema: int = SCHEMA
    created: str  # ISO 8601, UTC
    command: str
    versions: dict[str, str]
    hardware: dict[str, str]
    settings: dict[str, Any]  # tasks, lengths, depths, samples, oracle_length, seed
    model: dict[str, Any]
    text: dict[str, Any]
    methods: list[NeedleMethod]
    notes: list[str]
    asked: dict[str, Any] | None = None  # the settings that the command was given
