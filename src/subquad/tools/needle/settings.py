"""The settings of `subquad needle`, with their options on the command line."""

from dataclasses import dataclass
from pathlib import Path

from subquad.core.errors import InputError
from subquad.tools.needle.tasks import TASKS
from subquad.tools.runs import common_options as common
from subquad.tools.runs.options import option

NEEDLE_METHODS = ("clustered-tail", "local:window=512+keep")
NEEDLE_TASKS = ("niah_single", "niah_multikey", "vt", "cwe", "fwe")
NEEDLE_LENGTHS = (2048, 4096, 8192)


def _depths(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, common.read_list(text)))
    except ValueError:
        raise InputError(f"--depths {text!r} are not numbers; depths are written as 0,0.5,1") from None


@dataclass(frozen=True)
class NeedleSettings:
    """The settings of `needle`: what to hide in which prompts, and which attention has to retrieve it."""

    model: str | None = option(
        "demo-decoder", **(common.MODEL | {"help": "Hub id or folder of a causal language model, or demo-decoder."})
    )
    text: tuple[Path, ...] = option((), common.TEXT)
    column: str = option("text", common.COLUMN)
    tasks: tuple[str, ...] = option(
        NEEDLE_TASKS, f"{', '.join(TASKS)}; separated by commas.", read=common.read_list, shown=",".join(NEEDLE_TASKS)
    )
    methods: tuple[str, ...] = option(NEEDLE_METHODS, f"{common.METHODS} Default: {' '.join(NEEDLE_METHODS)}.")
    lengths: tuple[int, ...] | None = option(
        None,
        "Lengths of prompts with their answers in tokens, separated by commas; default: 2048, 4096 and 8192 as far as "
        "the model's positions reach, and the length of --extend.",
        read=common.read_lengths,
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
    extend: int | None = option(None, common.EXTEND)
    device: str = option("cpu", common.DEVICE)
    dtype: str | None = option(None, common.DTYPE)
    seed: int = option(0, "Random seed of the facts, and of the places in the text.")
