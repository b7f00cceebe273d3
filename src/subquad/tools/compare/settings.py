"""The settings of `subquad compare`, with their options on the command line."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from subquad.core.errors import InputError
from subquad.methods.full import FAST_EXACT
from subquad.tools.runs import common_options as common
from subquad.tools.runs.floor import check_floor
from subquad.tools.runs.options import option

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
LONG_BLOCKS = "clustered-tail:block=4096"  # by default too, in long prompts in bf16 on a processor with AMX
COMPARED_LONG = (FAST_EXACT, "clustered-tail", LONG_BLOCKS)  # by default in a long prompt of a causal language model
LENGTHS = (2048, 4096)  # of inputs that compare runs in addition to the main length
OP_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)  # at which it runs one layer's attention alone
AUTO = "auto"


@dataclass(frozen=True)
class CompareSettings:
    """The settings of `compare`: what to compare, and how much work to spend."""

    model: str | None = option(
        "demo-decoder",
        **(common.MODEL | {"help": "Hub id or folder, or one of the demo extra: demo-decoder, demo-encoder."}),
    )
    text: tuple[Path, ...] = option((), common.TEXT)
    column: str = option("text", common.COLUMN)
    task: str | None = option(None, "Also score a labelled task: banking77, movie-reviews, sts, labelled or retrieval.")
    data_dir: Path | None = option(None, **common.DATA)
    examples: int | None = option(None, "Number of the task's examples, chosen at random; default: all.")
    methods: tuple[str, ...] = option(
        COMPARED,
        f"{common.METHODS} Default: exact attention by subquad's kernel, and ten settings of seven methods, or four in "
        "a causal language model; in 16 bits, those of them that are closest, and from 8,192 tokens on, on a processor "
        f"with AMX, {LONG_BLOCKS}.",
    )
    adapters: tuple[Path, ...] = option((), **common.ADAPTERS)
    plans: tuple[Path, ...] = option((), **common.PLANS)
    attention: tuple[str, ...] = option(
        (),
        "An attention of transformers that is not subquad's, as its own row: eager, flex_attention, or a name that was "
        "registered there; repeatable.",
    )
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
        read=common.read_lengths,
    )
    extend: int | None = option(None, common.EXTEND)
    new_tokens: int | None = option(None, common.NEW_TOKENS)
    batch: int = option(1, "Texts per forward pass; several are padded and keep their different lengths.")
    passages: int = option(32, "Number of passages on which quality is measured at the model's own length.")
    minutes: float = option(
        4.0, "Time limit in minutes, without --calibrate. Each length gets its first figures as early as possible."
    )
    layers: bool = option(False, "Also measure the error of each layer's attention.")
    min_fidelity: float | None = option(None, common.FLOORS["fidelity"], reading=True)
    max_kl: float | None = option(None, common.FLOORS["kl"], reading=True)
    min_agreement: float | None = option(None, common.FLOORS["agreement"], reading=True)
    device: str = option("cpu", common.DEVICE)
    dtype: str = option(
        AUTO,
        "Run the model in fp32, bf16 or fp16; auto: in fp32, and in bf16 too if the processor has 16-bit products. "
        "Fidelity is always to exact attention in fp32.",
    )
    op_lengths: tuple[int, ...] | None = None  # of one layer's attention alone; default: OP_LENGTHS up to the maximum
    seed: int = 0

    def __post_init__(self) -> None:
        check_floor(self)
        common.check_model_runs(self.dtype, self.batch, self.extend, self.new_tokens, (AUTO,))
        if self.passages < 1:
            raise InputError(f"--passages {self.passages} must be at least 1")
        if self.examples is not None and self.task is None:
            raise InputError(f"--examples {self.examples} chooses examples of a task, but no --task is given")
        if not 0.0 < self.minutes < math.inf:
            raise InputError(f"--minutes {self.minutes:g} must be above 0 and finite")
        if self.lengths is not None and min(self.lengths, default=1) < 1:
            raise InputError(f"--lengths {','.join(map(str, self.lengths))}: a length must be at least 1")
        if self.max_length is not None and self.lengths is None and self.max_length < (self.extend or 0):
            raise InputError(
                f"--extend {self.extend} is more than --max-length {self.max_length}; leave --max-length out, or give "
                "--lengths"
            )
        if self.max_length is not None and self.named_lengths and max(self.named_lengths) > self.max_length:
            raise InputError(
                f"--lengths {','.join(map(str, self.named_lengths))} names more tokens than --max-length "
                f"{self.max_length}; give shorter lengths, or leave --max-length out"
            )

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
