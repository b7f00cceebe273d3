"""The settings of `subquad inspect`, with their options on the command line."""

from dataclasses import dataclass
from pathlib import Path

from subquad.tools.runs import common_options as common
from subquad.tools.runs.options import option

INSPECTED = (  # "{buckets}" is the value of --buckets
    "clustered:clusters=25",
    "i-clustered:clusters=25,topk=32",
    "lsh:buckets={buckets}",
    "smyrf:clusters={buckets}",
    "lha:buckets={buckets}",
)


@dataclass(frozen=True)
class InspectSettings:
    """The settings of `inspect`."""

    model: str | None = option(None, **common.MODEL)
    text: tuple[Path, ...] = option((), common.TEXT)
    column: str = option("text", common.COLUMN)
    methods: tuple[str, ...] = option(INSPECTED, common.METHODS)
    adapters: tuple[Path, ...] = option((), **common.ADAPTERS)
    plans: tuple[Path, ...] = option((), **common.PLANS)
    buckets: int = option(4, "Number of buckets B, for the upper bound at N/B keys and for the default methods.")
    length: int | None = option(None, "Tokens per sequence; default: the model's positions, at most 512.")
    sequences: int = option(4, "Number of sequences, spread over the text.")
    layer: int | None = option(None, "Layer of the attention maps and bucket sizes; default: the middle layer.")
    head: int = option(0, "Head of the attention maps.")
    tokens: int = option(40, "Number of tokens that the attention maps show, from the first on.")
    spectrum: bool = option(False, "Also show the singular values of exact attention's weights.")
    device: str = option("cpu", common.DEVICE)
    seed: int = 0
