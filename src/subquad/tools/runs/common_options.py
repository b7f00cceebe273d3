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


def check_model_runs(
    dtype: str | None, batch: int, extend: int | None, new_tokens: int | None, others: tuple[str, ...] = ()
) -> None:
    """Check how a command is asked to run a model.

    Raises:
        InputError: the dtype is none of `DTYPES`, nor of the `others` that the command accepts; a count of texts or of
            positions is below 1; or the new tokens are below 0, or 1, which no step gives.
    """
    if dtype is not None and dtype not in DTYPES + others:
        raise InputError(f"--dtype {dtype!r} is none of {', '.join(DTYPES + others)}")
    if new_tokens is not None and (new_tokens < 0 or new_tokens == 1):
        raise InputError(
            f"--new-tokens {new_tokens} must be 0, for no requests, or at least 2: the prefill gives the first new "
            "token, and steps give the others"
        )
    for name, count in (("extend", extend), ("batch", batch)):
        if count is not None and count < 1:
            raise InputError(f"--{name} {count} must be at least 1")
