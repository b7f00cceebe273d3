"""The content of a report of `subquad plan`, as plain data."""

from typing import Any, NotRequired, TypedDict


class PlannedLayer(TypedDict):
    """The method that runs in a layer at a length."""

    method: str
    start: int  # the length from which on it runs
    loss: float  # with it in this layer alone, mean over the passages
    time: float  # of a call, as a share of exact attention's
    error: float | None  # relative error of the layer's output; None for exact attention


class Verification(TypedDict):
    """One choice on the held-out passages."""

    predicted: float  # the sum of the single losses
    loss: float  # the mean
    bound: float  # on the mean loss
    speedup: float  # of the whole model, the median
    passages: int


class RequestTimes(TypedDict):
    """The time that a request takes, in milliseconds."""

    first_ms: float  # to the first token: the prefill
    step_ms: float  # each further token
    ms: float  # the whole request


class PlannedRequests(TypedDict):
    """Requests with exact attention and with the plan."""

    new_tokens: int
    exact: RequestTimes
    plan: RequestTimes
    step_speedup: float  # the median of the ratios within a turn
    speedup: float  # of the whole request
    exact_steps: bool  # whether steps are exact attention by construction
    step_kl: float  # KL(exact ‖ plan) of a step on the same cache, in nats


class Uniform(TypedDict):
    """The fastest single method whose predicted loss is accepted."""

    method: str
    predicted: float
    loss: NotRequired[float]
    speedup: NotRequired[float]


class OtherFloor(TypedDict):
    """The choice that another floor would give, as predicted."""

    floor: float
    chosen: dict[str, str]
    loss: float
    speedup: float
    uniform: str | None
    uniform_speedup: float


class BatchSizes(TypedDict):
    """The sizes of the held-out batches of a length."""

    batch: int  # texts
    tokens: float  # of a text, mean, without padding
    padded: float  # tokens of the longest text of a batch, mean


class PlannedLength(TypedDict):
    """One length."""

    length: int
    layers: dict[str, PlannedLayer]
    rounds: list[Verification]
    verified: NotRequired[Verification]  # missing where the plan is exact attention
    requests: NotRequired[PlannedRequests]  # of a causal language model
    exact_because: NotRequired[str]
    unproven: NotRequired[str]  # why losses on this text prove little, in a clause
    without_attention: NotRequired[float]  # fidelity
    lossless: NotRequired[float]  # predicted speed-up of exact attention by subquad's kernel alone
    uniform: NotRequired[Uniform]
    floors: list[OtherFloor]
    passages: int  # on which single losses were measured; batches, if these are described
    batches: NotRequired[BatchSizes]  # missing where every input has the length
    model_ms: NotRequired[float]  # of an exact pass; missing where none was run
    tried: int  # candidates
    least_seconds: NotRequired[float]  # that deciding takes, where the time did not suffice for it


class PlanReport(TypedDict):
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
    next: NotRequired[str]  # the command that compares the plan with other methods
    notes: list[str]
