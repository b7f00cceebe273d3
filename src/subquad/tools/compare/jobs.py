"""The jobs of a comparison, and the result of each.

layers/<method>          error of every layer's output, distance of attention weights
quality/<method>         the text read at the model's own length
stretch/<length>/<i>     one sequence of that length through all rows in turn: time, outputs; memory once
op/<length>              one layer's attention alone, all rows in turn
task/<method>            the labelled task
"""

from dataclasses import dataclass
from typing import Any

from subquad.tools.runs import machine
from subquad.tools.runs.jobs import JobKind


@dataclass
class LayerErrors:
    """A method against exact attention in the layers that run it; empty for exact attention itself."""

    layer_error: dict[str, float] | None = None  # by layer
    weights_l1: float | None = None


@dataclass
class Embeddings:
    """What an embedding model made of the text."""

    passages: list[list[float]]
    queries: list[list[float]]


@dataclass
class Losses:
    """What a masked language model lost on the text: negative log-likelihoods in nats, and of how many tokens."""

    nll: float
    count: int


@dataclass
class SequencePass:
    """One sequence through the model with one row. Output: [embedding], [nll, count], or the sums of `NextTokens`."""

    output: list[Any]
    seconds: float | None = None  # of all sequences but the first
    extra_mib: float | None = None  # of the first


@dataclass
class SequenceRound:
    """One sequence through all rows."""

    rows: dict[str, SequencePass]
    use: machine.Use


@dataclass
class OpTiming:
    """One row's attention alone."""

    seconds: list[float]  # of each round
    extra_mib: float | None = None


@dataclass
class OpRounds:
    """All rows' attention alone, at one length."""

    rows: dict[str, OpTiming]
    use: machine.Use


LAYERS: JobKind[LayerErrors] = JobKind("layers", LayerErrors, "errors of single layers, {0}".format)
QUALITY: JobKind[Embeddings | Losses] = JobKind("quality", Embeddings | Losses, "reading the text with {0}".format)
TASK: JobKind[dict[str, float]] = JobKind("task", dict[str, float], "scoring the task with {0}".format)
SEQUENCE: JobKind[SequenceRound] = JobKind(
    "stretch",
    SequenceRound,
    lambda length, i: f"timing the model with each method at {length:,} tokens, sequence {i + 1}",
)
OP: JobKind[OpRounds] = JobKind(
    "op", OpRounds, "timing the attention of one layer with each method at {0:,} tokens".format
)
