"""The settings of compare, bench, inspect, needle, calibrate and doctor, with their options on the command line."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from subquad.core.errors import InputError
from subquad.tools.runs.floor import MAX_KL, MIN_FIDELITY, check_floor
from subquad.tools.runs.options import option

FAST_EXACT = "full:kernel=subquad"
COMPARED = (
    FAST_EXACT,
    "clustered:clusters=25",
    "i-clustered:clusters=25,topk=32",
    "i-clustered:clusters=100,topk=32",
    "clustered-tail:clusters=32,topk=32,cells=8",
    "clustered-tail",
    "clustered-tail:clusters=64,topk=96",
    "local:window=64",
    "smyrf:cluster_size=64",
    "performer",
    "nystrom",
)
COMPARED_CAUSAL = (  # in a causal language model: what can work there without training
    FAST_EXACT,
    "clustered-tail",
    "clustered-tail:clusters=48,topk=96",
    "i-clustered:clusters=64,topk=128",
    "local:window=512+keep",
)
COMPARED_16_BITS = (FAST_EXACT, "clustered-tail", "clustered-tail:clusters=64,topk=96")  # by default, in 16 bits too
COMPARED_16_BITS_CAUSAL = (FAST_EXACT, "clustered-tail", "clustered-tail:clusters=48,topk=96")
COMPARED_LONG = (FAST_EXACT, "clustered-tail")  # by default in a long prompt of a causal language model
COMPARED_LEARNED = (  # in addition, if there is text to calibrate them on
    "lha:buckets=4",
    "lha-tail",
    "tilted-pool",
    "learned-feature-map",
    "tilted-pool:pools=0",  # the window and the sinks that those two have, alone: nothing to fit
    "linformer",
)
LENGTHS = (2048, 4096)  # of inputs that compare runs in addition to the main length
PLANNED_LENGTHS = (512, 2048, 4096)  # for which a plan is made
FROM_TEXT = "from-text"  # in place of lengths: those of the text's batches
OP_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)  # at which it runs one layer's attention alone
INSPECTED = (  # "{buckets}" is the value of --buckets
    "clustered:clusters=25",
    "i-clustered:clusters=25,topk=32",
    "lsh:buckets={buckets}",
    "smyrf:clusters={buckets}",
    "lha:buckets={buckets}",
)
BENCHED = ("clustered", "i-clustered")
CROSSING = ("clustered-tail", "i-clustered", "clustered")  # whose crossovers doctor measures
MASKS = ("none", "causal")
NEEDLE_METHODS = ("clustered-tail", "local:window=512+keep")
NEEDLE_TASKS = ("passkey", "keys", "variables", "frequent")
NEEDLE_LENGTHS = (2048, 4096, 8192)
BACKWARD = "forward+backward"
PASSES = ("forward", BACKWARD)
QUICK = {"lengths": (256, 1024, 4096), "passes": PASSES[:1]}  # of a quick benchmark, by default
STEPPED: dict[str, Any] = {  # of steps, by default: SmolLM2-135M's heads
    "lengths": (2048, 8192, 32768),
    "dtypes": ("float32", "bfloat16"),
    "passes": PASSES[:1],
    "heads": 9,
    "kv_heads": 3,
}


# Options that several commands have.
MODEL: dict[str, Any] = {
    "help": "Hub id or folder, or demo-decoder; default: demo-encoder, the encoder of the demo extra.",
    "argument": True,
}
TEXT = "Text to read: file, folder, .jsonl, .csv; repeatable. Default: Python's own documentation."
COLUMN = "The column of .jsonl, .csv and .tsv files with the text."
METHODS = 'Methods as "name:setting=value,…"; repeatable, or several separated by spaces.'
ADAPTERS = {
    "help": "Folder of an adapter from subquad calibrate, compared as its own row; repeatable.",
    "name": "adapter",
}
PLANS = {"help": "Folder of a plan from subquad plan, as its own row; repeatable.", "name": "plan"}
FLOORS = {
    "fidelity": f"Lowest mean cosine (or ratio of pseudo-perplexities) to exact; default: {MIN_FIDELITY:g}.",
    "kl": f"For causal language models: largest mean KL to exact next tokens, in nats; default: {MAX_KL:g}.",
    "agreement": "Instead of --max-kl: lowest share of exact top tokens.",
}
DEVICE = "Device: cpu, cuda, cuda:1."
DTYPES = ("fp32", "bf16", "fp16")
DTYPE = "Run the model in fp32, bf16 or fp16, exact attention too; default: the dtype of its weights."
AUTO = "auto"
NEW_TOKENS = (
    "For causal language models: tokens that a request generates after its prompt; 0: no requests. Default: 128, at "
    "the lengths after which the model has positions for them."
)
EXTEND = (
    "Extend the positions to this many tokens, without training: rotary ones by YaRN. Requests that fit the model's "
    "own positions keep these."
)
DATA = {"help": "Folder of real data, with one folder for each source.", "envvar": "SUBQUAD_DATA"}


def _listed(text: str) -> tuple[str, ...]:
    if not all(map(str.strip, text.split(","))):
        raise InputError(f"{text!r} has an empty place between its commas; give a value or leave it out")
    return tuple(text.replace(",", " ").split())


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(map(_whole, _listed(text)))


def _lengths_to_plan(text: str) -> tuple[int, ...] | str:
    return FROM_TEXT if text.strip() == FROM_TEXT else _lengths(text)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"length {text!r} is not a whole number; lengths are written as 512,1024") from None


def _depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, _listed(text)))
    except ValueError:
        raise InputError(f"--depths {text!r} are not numbers; depths are written as 0,0.5,1") from None


def check_dtype(name: str | None, others: tuple[str, ...] = ()) -> None:
    """Check that a model can be run in this dtype.

    Raises:
        InputError: it is none of `DTYPES`, nor of the `others` that a command accepts.
    """
    if name is not None and name not in DTYPES + others:
        raise InputError(f"--dtype {name!r} is none of {', '.join(DTYPES + others)}")


def check_extension(tokens: int | None) -> None:
    """Check that a model can be extended to a number of tokens.

    Raises:
        InputError: it is below 1.
    """
    if tokens is not None and tokens < 1:
        raise InputError(f"--extend {tokens} must be at least 1")


def check_count_of_new_tokens(count: int | None) -> None:
    """Check that a number of new tokens is that of a request.

    Raises:
        InputError: it is below 0, or 1, which no step gives.
    """
    if count is not None and (count < 0 or count == 1):
        raise InputError(
            f"--new-tokens {count} must be 0, for no requests, or at least 2: the prefill gives the first new token, "
            "and steps give the others"
        )


@dataclass(frozen=True)
class CompareSettings:
    """The settings of `compare`: what to compare, and how much work to spend."""

    model: str | None = option(
        "demo-decoder", **(MODEL | {"help": "Hub id or folder, or one of the demo extra: demo-decoder, demo-encoder."})
    )
    text: tuple[Path, ...] = option((), TEXT)
    column: str = option("text", COLUMN)
    task: str | None = option(None, "Also score a labelled task: banking77, movie-reviews, sts, labelled or retrieval.")
    data_dir: Path | None = option(None, **DATA)
    examples: int | None = option(None, "Number of the task's examples, chosen at random; default: all.")
    methods: tuple[str, ...] = option(
        COMPARED,
        f"{METHODS} Default: exact attention by subquad's kernel, and ten settings of seven methods, or four in a "
        "causal language model; in 16 bits, those of them that are closest.",
    )
    adapters: tuple[Path, ...] = option((), **ADAPTERS)
    plans: tuple[Path, ...] = option((), **PLANS)
    calibrate: tuple[Path, ...] = option(
        (), "Fit learned parameters on this text first; it must not be the text compared on. Repeatable."
    )
    max_length: int | None = option(
        None, "Longest input in tokens; default: the model's positions, at most 512, and longer ones up to 16,384."
    )
    lengths: tuple[int, ...] | None = option(
        None,
        "Lengths in tokens at which the whole model is run, separated by commas; default: the model's own length, at "
        "most 512, and 2048 and 4096 up to --max-length; of a causal language model 2048 and 8192.",
        read=_lengths,
    )
    extend: int | None = option(None, EXTEND)
    new_tokens: int | None = option(None, NEW_TOKENS)
    batch: int = option(1, "Texts per forward pass; several are padded and keep their different lengths.")
    passages: int = option(32, "Number of passages on which quality is measured at the model's own length.")
    minutes: float = option(
        4.0, "Time limit in minutes, without --calibrate. Each length gets its first figures as early as possible."
    )
    layers: bool = option(False, "Also measure the error of each layer's attention.")
    min_fidelity: float | None = option(None, FLOORS["fidelity"], reading=True)
    max_kl: float | None = option(None, FLOORS["kl"], reading=True)
    min_agreement: float | None = option(None, FLOORS["agreement"], reading=True)
    device: str = option("cpu", DEVICE)
    dtype: str = option(
        AUTO,
        "Run the model in fp32, bf16 or fp16; auto: in fp32, and in bf16 too if the processor has 16-bit products. "
        "Fidelity is always to exact attention in fp32.",
    )
    op_lengths: tuple[int, ...] | None = None  # of one layer's attention alone; default: OP_LENGTHS up to the maximum
    seed: int = 0

    def __post_init__(self) -> None:
        check_floor(self)
        check_dtype(self.dtype, (AUTO,))
        check_count_of_new_tokens(self.new_tokens)
        check_extension(self.extend)
        for name, least in (("batch", 1), ("passages", 1)):
            if getattr(self, name) < least:
                raise InputError(f"--{name} {getattr(self, name)} must be at least {least}")
        if self.examples is not None and self.task is None:
            raise InputError(f"--examples {self.examples} chooses examples of a task, but no --task is given")
        if not 0.0 < self.minutes < math.inf:
            raise InputError(f"--minutes {self.minutes:g} must be above 0 and finite")
        if self.lengths is not None and min(self.lengths, default=1) < 1:
            raise InputError(f"--lengths {','.join(map(str, self.lengths))}: a length must be at least 1")

    @property
    def as_used(self) -> "CompareSettings":
        """The settings without a folder of data that no task reads."""
        return self if self.task else replace(self, data_dir=None)

    @property
    def named_lengths(self) -> tuple[int, ...]:
        """The lengths that the user named."""
        return self.lengths or ()

    @property
    def model_lengths(self) -> tuple[int, ...]:
        """The lengths beyond the main one at which the whole model is run, the shortest first."""
        return self._up_to_longest(LENGTHS) if self.lengths is None else tuple(sorted(self.lengths))

    @property
    def call_lengths(self) -> tuple[int, ...]:
        """The lengths at which one layer's attention is run alone, the shortest first."""
        if self.op_lengths is not None:
            return tuple(sorted(self.op_lengths))
        return self._up_to_longest(OP_LENGTHS) or (self.max_length or OP_LENGTHS[0],)

    def _up_to_longest(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n for n in lengths if self.max_length is None or n <= self.max_length)


@dataclass(frozen=True)
class PlanSettings:
    """The settings of `plan`: for what, on what text, and how much error is accepted."""

    model: str | None = option(None, **MODEL)
    text: tuple[Path, ...] = option((), TEXT)
    column: str = option("text", COLUMN)
    min_fidelity: float | None = option(None, FLOORS["fidelity"])
    max_kl: float | None = option(None, FLOORS["kl"])
    min_agreement: float | None = option(None, FLOORS["agreement"])
    shift: float = option(
        1.6, "Safety factor for other text: the accepted loss on this text is divided by it; 1: plan for this text."
    )
    lengths: tuple[int, ...] | str | None = option(
        None,
        "Lengths to plan for, in tokens, separated by commas, or from-text for those that batches of the text have; "
        "default: 512,2048,4096.",
        read=_lengths_to_plan,
    )
    extend: int | None = option(None, EXTEND)
    new_tokens: int | None = option(None, NEW_TOKENS)
    batch: int = option(1, "Texts per forward pass; several are padded and keep their different lengths.")
    methods: tuple[str, ...] = option((), f"{METHODS} Default: a grid that grows with the length.")
    adapters: tuple[Path, ...] = option(
        (), **(ADAPTERS | {"help": "Folder of an adapter from subquad calibrate, as a candidate; repeatable."})
    )
    calibrate: tuple[Path, ...] = option(
        (), "Fit methods with learned parameters on this text first, as candidates; it must not be --text. Repeatable."
    )
    minutes: float = option(10.0, "Time limit in minutes, without --calibrate.")
    device: str = option("cpu", DEVICE)
    dtype: str | None = option(None, DTYPE)
    seed: int = option(0, "Random seed for the passages.")

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_count_of_new_tokens(self.new_tokens)
        check_extension(self.extend)
        if self.batch < 1:
            raise InputError(f"--batch {self.batch} must be at least 1")

    @property
    def is_from_text(self) -> bool:
        """True if the lengths to plan for are those of the text's batches."""
        return self.lengths == FROM_TEXT

    @property
    def named_lengths(self) -> tuple[int, ...]:
        """The lengths that the user named."""
        return () if self.lengths is None or isinstance(self.lengths, str) else self.lengths

    @property
    def model_lengths(self) -> tuple[int, ...]:
        """The lengths to plan for, the shortest first, each once; empty if they are those of the text."""
        planned = PLANNED_LENGTHS if self.extend is None else (*PLANNED_LENGTHS, self.extend)
        return tuple(sorted(set(planned if self.lengths is None else self.named_lengths)))


@dataclass(frozen=True)
class BenchSettings:
    """The settings of `bench`. The defaults are the clustered paper's: batch 1, 6 heads, D = 64."""

    methods: tuple[str, ...] = option(BENCHED, METHODS)
    plans: tuple[Path, ...] = option(
        (), "Folder of a plan from subquad plan: its methods, in place of the default ones; repeatable.", name="plan"
    )
    lengths: tuple[int, ...] = option(
        (256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384), "Lengths in tokens, separated by commas.", read=_lengths
    )
    passes: tuple[str, ...] = option(
        PASSES, "forward, forward+backward, or both separated by a comma; default: both.", read=_listed
    )
    dtypes: tuple[str, ...] = option(
        ("float32",),
        "float32, bfloat16, float16, float64; separated by commas; default: float32, and with --steps bfloat16 too.",
        read=_listed,
    )
    device: str = option("cpu", DEVICE)
    batch: int = option(1, "Sequences per call.")
    heads: int | None = option(None, "Number of heads; default: those of the plan's model, or 6.")
    head_dim: int | None = option(None, "Width of each head; default: that of the plan's model, or 64.")
    threads: int | None = option(None, "Number of threads for torch; default: torch's own choice.")
    seed: int = option(0, "Random seed of the inputs.")
    causal: bool = option(False, "Causal attention, relative to causal SDPA; methods that cannot be causal are named.")
    call_limit: float = option(10.0, "Time limit in seconds; a call that is predicted to take longer is not run.")
    quick: bool = option(False, "Three lengths, forward passes only, few rounds, no memory.")
    steps: bool = option(
        False,
        "Measure steps on a cache instead: exact attention of 1, 4, 16 and 32 queries over all keys, relative to the "
        "machine's own read of as many bytes.",
    )
    kv_heads: int | None = option(None, "With --steps: number of key heads; default: 3, or as many as --heads.")


@dataclass(frozen=True)
class CrossoverSettings:
    """Which crossovers `subquad doctor --measure` measures."""

    methods: tuple[str, ...] = option(CROSSING, f"{METHODS} Default: {' '.join(CROSSING)}.")
    lengths: tuple[int, ...] = option(
        tuple(round(128 * 2 ** (half / 2)) for half in range(13)),
        "Lengths in tokens, separated by commas; default: 128 to 8192 in steps of √2.",
        read=_lengths,
    )
    dtypes: tuple[str, ...] = option(
        ("float32", "bfloat16"),
        "float32, bfloat16, float16, float64; separated by commas.",
        read=_listed,
        shown="float32,bfloat16",
    )
    masks: tuple[str, ...] = option(MASKS, "none, causal, or both separated by a comma; default: both.", read=_listed)
    heads: int = option(12, "Number of heads.")
    head_dim: int = option(64, "Width of each head.")
    device: str = option("cpu", DEVICE)


@dataclass(frozen=True)
class InspectSettings:
    """The settings of `inspect`."""

    model: str | None = option(None, **MODEL)
    text: tuple[Path, ...] = option((), TEXT)
    column: str = option("text", COLUMN)
    methods: tuple[str, ...] = option(INSPECTED, METHODS)
    adapters: tuple[Path, ...] = option((), **ADAPTERS)
    plans: tuple[Path, ...] = option((), **PLANS)
    buckets: int = option(4, "Number of buckets B, for the upper bound at N/B keys and for the default methods.")
    length: int | None = option(None, "Tokens per sequence; default: the model's positions, at most 512.")
    sequences: int = option(4, "Number of sequences, spread over the text.")
    layer: int | None = option(None, "Layer of the attention maps and bucket sizes; default: the middle layer.")
    head: int = option(0, "Head of the attention maps.")
    tokens: int = option(40, "Number of tokens that the attention maps show, from the first on.")
    spectrum: bool = option(False, "Also show the singular values of exact attention's weights.")
    device: str = option("cpu", DEVICE)
    seed: int = 0


@dataclass(frozen=True)
class NeedleSettings:
    """The settings of `needle`: what to hide in which prompts, and which attention has to retrieve it."""

    model: str | None = option(
        "demo-decoder", **(MODEL | {"help": "Hub id or folder of a causal language model, or demo-decoder."})
    )
    text: tuple[Path, ...] = option((), TEXT)
    column: str = option("text", COLUMN)
    tasks: tuple[str, ...] = option(
        NEEDLE_TASKS,
        "passkey, keys, variables, frequent; separated by commas.",
        read=_listed,
        shown=",".join(NEEDLE_TASKS),
    )
    methods: tuple[str, ...] = option(NEEDLE_METHODS, f"{METHODS} Default: {' '.join(NEEDLE_METHODS)}.")
    lengths: tuple[int, ...] | None = option(
        None,
        "Lengths of prompts with their answers in tokens, separated by commas; default: 2048, 4096 and 8192 as far as "
        "the model's positions reach.",
        read=_lengths,
    )
    depths: tuple[float, ...] = option(
        (0.0, 0.25, 0.5, 0.75, 1.0),
        "Position of the fact: 0 at the beginning of the text, 1 at its end; separated by commas.",
        read=_depths,
        shown="0,0.25,0.5,0.75,1",
    )
    samples: int = option(2, "Prompts of each task, length and depth.")
    oracle_length: int = option(
        2048, "Longest prompt that the oracle reads, one of each task and depth; it is slow; 0: no oracle."
    )
    device: str = option("cpu", DEVICE)
    seed: int = option(0, "Random seed of the facts, and of the places in the text.")


@dataclass(frozen=True)
class CalibrateSettings:
    """The settings of `calibrate`: what to fit, on what, and how long."""

    method: str = option("lha-tail", 'A method with learned parameters, as "name:setting=value,…".')
    text: tuple[Path, ...] = option((), "Plain text to fit on: file, folder, .jsonl, .csv; repeatable.")
    model: str | None = option(None, **MODEL)
    column: str = option("text", COLUMN)
    steps: int | None = option(None, "Maximum number of steps; default: the method's own recipe.")
    max_length: int | None = option(None, "Tokens per passage; default: the model's positions, at most 512.")
    batch: int = option(1, "Passages per step.")
    held_out: int = 4  # passages
    seed: int = option(0, "Random seed for passage order and the held-out split.")
    device: str = option("cpu", DEVICE)
