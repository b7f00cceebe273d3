"""The jobs of a comparison, and the result of each.

stretch/<length>/<i>     one batch of that length through all rows in turn: time, outputs; memory once
quality/<method>         the text read at the model's own length
task/<method>            the labelled task
steps/<length>           steps on the cache of that length's first batch, all rows in turn
eager/<length>           time and memory of the model's own attention as eager code, which forms the whole matrix
op/<length>              one layer's attention alone, all rows in turn
layers/<method>          error of every layer's output, distance of attention weights
"""

from dataclasses import dataclass, field
from typing import Any

from subquad.tools.models.generation import StepTimes
from subquad.tools.runs import machine
from subquad.tools.runs.jobs import JobKind

JOBS_VERSION = 8  # changes with what the results of jobs hold, so that a run of another version is not resumed


@dataclass
class LayerErrors:
    """A method against exact attention in the layers that run it; empty for exact attention itself."""

    layer_error: dict[str, float] | None = None  # by layer
    weights_l1: float | None = None


@dataclass
class Embeddings:
    """The embeddings of the text by an embedding model."""

    passages: list[list[float]]
    queries: list[list[float]]


@dataclass
class Losses:
    """The loss of a masked language model on the text: total negative log-likelihood, in nats, of `count` tokens."""

    nll: float
    count: int


@dataclass
class SequencePass:
    """One batch through the model with one row. Output: embeddings, [nll, count], or the sums of `NextTokens`."""

    output: list[Any]
    seconds: float  # of the first batch, with the record of its memory and without a warm-up
    extra_mib: float | None = None  # of the first batch


@dataclass
class SequenceRound:
    """One batch through all rows."""

    rows: dict[str, SequencePass]
    use: machine.Use
    tokens: int  # without padding
    quarters: list[float] = field(default_factory=list)  # beyond the positions of a causal model: see `quarter_sums`


@dataclass
class StepRounds:
    """Generated tokens after the prompts of one length, by all rows."""

    times: StepTimes
    use: machine.Use


@dataclass
class EagerPass:
    """One batch through the model with its own attention as eager code."""

    seconds: float
    extra_mib: float


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
    lambda length, i: f"timing the model with each method at {length:,} tokens, turn {i + 1}",
)
STEPS: JobKind[StepRounds] = JobKind(
    "steps", StepRounds, "timing generated tokens with each method after {0:,} tokens".format
)
EAGER: JobKind[EagerPass] = JobKind("eager", EagerPass, "eager attention at {0:,} tokens".format)
OP: JobKind[OpRounds] = JobKind(
    "op", OpRounds, "timing the attention of one layer with each method at {0:,} tokens".format
)
