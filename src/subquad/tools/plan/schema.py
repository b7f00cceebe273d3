"""The content of a report of `subquad plan`; None: not measured, or there is none."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PlannedLayer:
    """The method that runs in a layer at a length."""

    method: str
    start: int  # the length from which on it runs
    loss: float  # with it in this layer alone, mean over the passages
    time: float  # of a call, as a share of exact attention's
    error: float | None  # relative error of the layer's output; None for exact attention


@dataclass(frozen=True)
class Verification:
    """One choice on the held-out passages."""

    predicted: float  # the sum of the single losses
    loss: float  # the mean
    bound: float  # on the mean loss
    speedup: float  # of the whole model, the median
    passages: int


@dataclass(frozen=True)
class RequestTimes:
    """The time that a request takes, in milliseconds."""

    first_ms: float  # to the first token: the prefill
    step_ms: float  # each further token
    ms: float  # the whole request


@dataclass(frozen=True)
class PlannedRequests:
    """Requests with exact attention and with the plan."""

    new_tokens: int
    exact: RequestTimes
    plan: RequestTimes
    step_speedup: float  # the median of the ratios within a turn
    speedup: float  # of the whole request
    exact_steps: bool  # whether steps are exact attention by construction
    step_kl: float  # KL(exact ‖ plan) of a step on the same cache, in nats


@dataclass(frozen=True)
class Uniform:
    """The fastest single method whose predicted loss is accepted."""

    method: str
    predicted: float
    loss: float | None = None
    speedup: float | None = None


@dataclass(frozen=True)
class OtherFloor:
    """The choice that another floor would give, as predicted."""

    floor: float
    chosen: dict[str, str]
    loss: float
    speedup: float
    uniform: str | None
    uniform_speedup: float


@dataclass(frozen=True)
class BatchSizes:
    """The sizes of the held-out batches of a length."""

    batch: int  # texts
    tokens: float  # of a text, mean, without padding
    padded: float  # tokens of the longest text of a batch, mean


@dataclass(frozen=True)
class PlannedLength:
    """One length."""

    length: int
    layers: dict[str, PlannedLayer]
    rounds: list[Verification]
    floors: list[OtherFloor]
    passages: int  # on which single losses were measured; batches, if these are described
    tried: int  # candidates
    batches: BatchSizes | None = None  # None where every input has the length
    model_ms: float | None = None  # of an exact pass; None where none was run
    least_seconds: float | None = None  # that deciding takes, where the time did not suffice for it
    verified: Verification | None = None  # None where the plan is exact attention
    requests: PlannedRequests | None = None  # of a causal language model
    exact_because: str | None = None
    unproven: str | None = None  # why losses on this text prove little, in a clause
    without_attention: float | None = None  # fidelity
    lossless: float | None = None  # predicted speed-up of exact attention by subquad's kernel alone
    uniform: Uniform | None = None


@dataclass(frozen=True)
class PlanReport:
    """All of a plan."""

    kind: str
    schema: int
    created: str
    command: str
    versions: dict[str, str]
    hardware: dict[str, str]
    settings: dict[str, Any]
    model: dict[str, Any]
    text: dict[str, Any]
    lengths: list[PlannedLength]
    headline: str
    notes: list[str]
    next: str | None = None  # the command that compares the plan with other methods
    asked: dict[str, Any] | None = None  # settings that the command was given
