"""Options that several commands have, and the readers and checks of their values."""

from typing import Any

from subquad.core.errors import InputError
from subquad.tools.runs.floor import MAX_KL, MIN_FIDELITY

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
NEW_TOKENS = (
    "For causal language models: tokens that a request generates after its prompt; 0: no requests. Default: 128, at "
    "the lengths after which the model has positions for them."
)
EXTEND = (
    "Extend the positions to this many tokens, without training: rotary ones by YaRN. Requests that fit the model's "
    "own positions keep these."
)
DATA = {"help": "Folder of real data, with one folder for each source.", "envvar": "SUBQUAD_DATA"}


def read_list(text: str) -> tuple[str, ...]:
    """The words of a text, which commas or spaces separate.

    Raises:
        InputError: there is nothing between two commas.
    """
    if not all(map(str.strip, text.split(","))):
        raise InputError(f"{text!r} has an empty place between its commas; give a value or leave it out")
    return tuple(text.replace(",", " ").split())


def read_lengths(text: str) -> tuple[int, ...]:
    """The lengths that a text lists.

    Raises:
        InputError: one is not a whole number.
    """
    return tuple(map(_whole, read_list(text)))


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"length {text!r} is not a whole number; lengths are written as 512,1024") from None


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
