"""The shape of `report.json` of `subquad compare`, which its tables, plots and page are made from.

Times are in milliseconds (as defined by `measure.timing.Cost`), memory is in MiB, lengths are token counts as strings
(JSON keys). A figure that was not measured is absent or None, never 0.
"""

from typing import Any, Literal, NotRequired, TypedDict

from subquad.tools.measure.noise import Noise
from subquad.tools.measure.timing import Cost


class Quality(TypedDict):
    """Closeness to the exact model: the first group for embedding models, the second for language models."""

    cosine_mean: NotRequired[float]
    cosine_p5: NotRequired[float]
    relative_error: NotRequired[float]  # ‖embeddings − exact‖ / ‖exact‖, over all of them
    top1: NotRequired[float]  # share of queries whose best passage is the exact model's
    recall10: NotRequired[float]  # share of the exact model's ten best passages that are found among ten
    perplexity: NotRequired[float]
    of_exact: NotRequired[
        float
    ]  # without attention: the exact pseudo-perplexity of the same batch / this one, at most 1
    kl: NotRequired[float]  # of causal ones: mean KL(exact ‖ this) of next tokens, in nats
    agreement: NotRequired[float]  # share of positions with the exact model's top token
    kl_last_quarter: NotRequired[float]  # both over the last quarter of each text
    agreement_last_quarter: NotRequired[float]
    layer_error: NotRequired[dict[str, float]]  # layer number -> ‖out − exact‖ / ‖exact‖ on the exact model's q, k, v
    weights_l1: NotRequired[float]  # mean over sampled heads and queries of ‖A − A_exact‖₁, in [0, 2]


class RequestCost(Cost):
    """A whole request: the prefill and the steps after it. Its memory is the prefill's, the cache included."""

    new_tokens: int


class Requests(TypedDict):
    """Facts about the requests of all rows of a causal language model."""

    new_tokens: int
    prompts: dict[str, int]  # length -> the tokens of a prompt of this length that the new ones come after
    cache_mib: dict[str, dict[str, float]]  # length -> dtype -> the keys and values of the prompt
    steps: str  # which steps are exact attention, in a sentence
    refused: dict[str, str]  # a row without steps -> the reason


class MethodReport(TypedDict):
    """One row: a method with its settings."""

    method: str  # as the command line writes it, "i-clustered:clusters=25"
    settings: dict[str, Any]  # Method.to_dict()
    status: Literal["exact", "measured", "refused", "other", "reference"]  # "other": not subquad's
    reason: NotRequired[str]  # why it was refused, or which layers stay exact
    remarks: NotRequired[list[str]]  # what a reader must know of it: where it is exact, where it cannot run
    dtype: NotRequired[str]  # "fp32", "bf16" or "fp16"
    layers: NotRequired[list[int]]  # the layers that run it
    fidelity: NotRequired[dict[str, float]]  # length -> fidelity in [0, 1], what --min-fidelity is compared with
    relative_error: NotRequired[dict[str, float]]  # length -> ‖out − exact‖ / ‖exact‖ of the output, in sq.compare
    quality: NotRequired[dict[str, Quality]]  # length -> quality; the model's own length has the fullest entry
    model: NotRequired[dict[str, Cost]]  # length -> cost of a whole forward pass of one sequence
    step: NotRequired[dict[str, Cost]]  # length of the prompt -> cost of a generated token after it
    step_kl: NotRequired[dict[str, float]]  # the same -> KL(exact ‖ this) of a step in nats, on the same cache
    request: NotRequired[dict[str, RequestCost]]  # the same -> cost of the whole request
    op: NotRequired[dict[str, Cost]]  # length -> cost of one layer's attention alone
    crossover: NotRequired[float | None]  # tokens from which on the op is clearly faster than exact; None = not seen
    parallel: NotRequired[list[str]]  # where tokens are split, what its ranks send: "summary", "heads", "ring"
    adapter: NotRequired[str]  # the folder that its learned parameters come from
    plan: NotRequired[str]  # the folder of the plan that it runs
    unfitted: NotRequired[bool]  # its learned parameters are those that it starts with
    task: NotRequired[dict[str, float]]  # metric name -> score


class EagerCost(TypedDict):
    """One batch with the model's own attention as eager code, to compare with the same batch with SDPA."""

    ms: float
    speedup: float
    extra_mib: float


class RunNoise(Noise):
    """The noise of a comparison: how far exact attention, timed against itself, comes from 1, as a factor by length."""

    model: dict[str, float]
    op: dict[str, float]
    step: NotRequired[dict[str, float]]
    request: NotRequired[dict[str, float]]


class Attachment(TypedDict):
    """One model that follows the recommendation at every length: what `--save` saves and the printed code makes."""

    dtype: str  # of its weights: "fp32", "bf16" or "fp16"
    steps: dict[str, str]  # number of tokens from which on it runs -> the row, as `methods` names it
    lengths: list[int]  # at which this is recommended
    note: NotRequired[str]  # where it differs from the choice of a length, and why


class Recommendation(TypedDict):
    """The recommended method and the reasons."""

    choice: str  # a method as the command line writes it; "full" = stay with exact attention
    by_length: NotRequired[dict[str, str]]  # length that was judged -> the choice there
    too_noisy: NotRequired[list[int]]  # lengths that were not judged, because the times were too noisy
    warning: NotRequired[str]  # that the times are uncertain
    headline: str
    reasons: list[str]
    attachment: NotRequired[Attachment]  # absent if exact attention stays everywhere
    code: NotRequired[str]  # Python that loads the model and attaches it
    next: NotRequired[str]  # the command that searches further, for the same model and text


class Report(TypedDict):
    """All of `report.json`."""

    created: str  # ISO 8601, UTC
    command: str
    versions: dict[str, str]
    hardware: dict[str, str]
    settings: dict[
        str, Any
    ]  # max_length, lengths, op_lengths, min_fidelity, floor, seeds, passages …; ranks, where tokens are split
    model: dict[str, Any]  # name, class, kind, parameters, heads, head_dim, layers, position_limit, extended_to
    text: dict[str, Any]  # source, documents, passages, queries, tokens
    task: NotRequired[dict[str, Any]]  # name, metric, examples, baseline figures
    methods: list[MethodReport]
    without_attention: NotRequired[dict[str, Quality]]  # by length: the model whose attention outputs are 0, one batch
    eager: NotRequired[dict[str, EagerCost]]  # by length
    quarters: NotRequired[dict[str, list[float]]]  # by extended length: the exact model's perplexities
    requests: NotRequired[Requests]  # of a causal language model whose steps were timed
    noise: NotRequired[RunNoise]
    recommendation: Recommendation
    cautions: NotRequired[list[str]]  # the notes that the terminal shows too: what is missing, and extended positions
    notes: list[str]  # what a reader must know: what was skipped and why, how a figure was taken
