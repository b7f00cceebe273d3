"""The shape of `report.json` of `subquad compare`, which its tables, plots and page are made from.

Times are in milliseconds (as defined by `measure.timing.Cost`), memory is in MiB, lengths are token counts as strings
(JSON keys). A figure that was not measured is None or NaN, never 0. Fields are in the order of the file.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from subquad.tools.measure.noise import Noise
from subquad.tools.measure.timing import Cost

Part = Literal["model", "op", "step", "request"]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Closeness to the exact model: the first group for embedding models, the second for language models."""

    cosine_mean: float | None = None
    cosine_p5: float | None = None
    relative_error: float | None = None  # ‖embeddings − exact‖ / ‖exact‖, over all of them
    top1: float | None = None  # share of queries whose best passage is the exact model's
    recall10: float | None = None  # share of the exact model's ten best passages that are found among ten
    perplexity: float | None = None
    of_exact: float | None = None  # without attention: exact pseudo-perplexity of the same batch / this one, at most 1
    kl: float | None = None  # of causal ones: mean KL(exact ‖ this) of next tokens, in nats
    agreement: float | None = None  # share of positions with the exact model's top token
    kl_last_quarter: float | None = None  # both over the last quarter of each text
    agreement_last_quarter: float | None = None
    layer_error: dict[str, float] | None = None  # layer number -> ‖out − exact‖ / ‖exact‖ on the exact model's q, k, v
    weights_l1: float | None = None  # mean over sampled heads and queries of ‖A − A_exact‖₁, in [0, 2]


@dataclass(frozen=True, kw_only=True)
class RequestCost(Cost):
    """A whole request: the prefill and the steps after it. Its memory is the prefill's, the cache included."""

    new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Facts about the requests of all rows of a causal language model."""

    new_tokens: int
    prompts: dict[str, int]  # length -> the tokens of a prompt of this length that the new ones come after
    cache_mib: dict[str, dict[str, float]]  # length -> dtype -> the keys and values of the prompt
    steps: str  # which steps are exact attention, in a sentence
    refused: dict[str, str]  # a row without steps -> the reason


@dataclass(frozen=True, kw_only=True)
class MethodReport:
    """One row: a method with its settings."""

    method: str  # as the command line writes it, "i-clustered:clusters=25"
    settings: dict[str, Any]  # Method.to_dict()
    status: Literal["exact", "measured", "refused", "other", "reference"]  # "other": not subquad's
    dtype: str | None = None  # "fp32", "bf16" or "fp16"
    layers: list[int] | None = None  # the layers that run it
    quality: dict[str, Quality] | None = None  # length -> quality; the model's own length has the fullest entry
    fidelity: dict[str, float] | None = None  # length -> fidelity in [0, 1], what --min-fidelity is compared with
    relative_error: dict[str, float] | None = None  # length -> ‖out − exact‖ / ‖exact‖ of the output, in sq.compare
    model: dict[str, Cost] | None = None  # length -> cost of a whole forward pass of one batch
    op: dict[str, Cost] | None = None  # length -> cost of one layer's attention alone
    step: dict[str, Cost] | None = None  # length of the prompt -> cost of a generated token after it
    request: dict[str, RequestCost] | None = None  # the same -> cost of the whole request
    step_kl: dict[str, float] | None = None  # the same -> KL(exact ‖ this) of a step in nats, on the same cache
    parallel: list[str] | None = None  # where tokens are split, what its ranks send: "summary", "heads", "ring"
    adapter: str | None = None  # the folder that its learned parameters come from
    plan: str | None = None  # the folder of the plan that it runs
    unfitted: bool | None = None  # its learned parameters are those that it starts with
    reason: str | None = None  # why it was refused, or which layers stay exact
    remarks: list[str] | None = None  # what a reader must know of it: where it is exact, where it cannot run
    crossover: float | None = math.nan  # tokens from which on the op is clearly faster than exact; None: not seen
    task: dict[str, float] | None = None  # metric name -> score

    def cost(self, part: Part, length: int | str) -> Cost:
        """Time and memory of a part at a length; of unknown figures where there are none."""
        return (getattr(self, part) or {}).get(str(length)) or Cost()

    def fidelity_at(self, length: int | str) -> float:
        """Fidelity at a length; −∞ where there is none."""
        return (self.fidelity or {}).get(str(length), -math.inf)


@dataclass(frozen=True, kw_only=True)
class EagerCost:
    """One batch with the model's own attention as eager code, to compare with the same batch with SDPA."""

    ms: float
    speedup: float
    extra_mib: float


@dataclass(frozen=True, kw_only=True)
class RunNoise(Noise):
    """The noise of a comparison: how far exact attention, timed against itself, comes from 1, as a factor by length."""

    model: dict[str, float]
    op: dict[str, float]
    step: dict[str, float] | None = None
    request: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """One model that follows the recommendation at every length: what `--save` saves and the printed code makes."""

    dtype: str  # of its weights: "fp32", "bf16" or "fp16"
    steps: dict[str, str]  # number of tokens from which on it runs -> the row, as `methods` names it
    lengths: list[int]  # at which this is recommended
    note: str | None = None  # where it differs from the choice of a length, and why


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The recommended method and the reasons."""

    choice: str  # a method as the command line writes it; "full" = stay with exact attention
    by_length: dict[str, str] | None = None  # length that was judged -> the choice there
    headline: str
    reasons: list[str]
    too_noisy: list[int] | None = None  # lengths that were not judged, because the times were too noisy
    warning: str | None = None  # that the times are uncertain
    attachment: Attachment | None = None  # absent if exact attention stays everywhere
    code: str | None = None  # Python that loads the model and attaches it
    next: str | None = None  # the command that searches further, for the same model and text


@dataclass(frozen=True, kw_only=True)
class MeasuredReport:
    """All of `report.json` but the recommendation, which is made from it."""

    created: str  # ISO 8601, UTC
    command: str
    versions: dict[str, str]
    hardware: dict[str, str]
    settings: dict[
        str, Any
    ]  # max_length, lengths, op_lengths, min_fidelity, floor, seeds …; ranks, if there are several
    model: dict[str, Any]  # name, class, kind, parameters, heads, head_dim, layers, position_limit, extended_to
    text: dict[str, Any]  # source, documents, passages, queries, tokens
    methods: list[MethodReport]
    without_attention: dict[str, Quality] | None = None  # by length: the model whose attention outputs are 0, one batch
    eager: dict[str, EagerCost] | None = None  # by length
    noise: RunNoise | None = None
    notes: list[str]  # what a reader must know: what was skipped and why, how a figure was taken
    cautions: list[str] | None = None  # the notes that the terminal shows too: what is missing, and extended positions
    quarters: dict[str, list[float]] | None = None  # by extended length: the exact model's perplexities
    requests: Requests | None = None  # of a causal language model whose steps were timed
    task: dict[str, Any] | None = None  # name, metric, examples, baseline figures


@dataclass(frozen=True, kw_only=True)
class Report(MeasuredReport):
    """All of `report.json`."""

    recommendation: Recommendation
    asked: dict[str, Any] | None = None  # the settings that the command was given
