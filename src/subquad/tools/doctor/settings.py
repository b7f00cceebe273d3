"""The settings of `subquad doctor --measure`, with their options on the command line."""

from dataclasses import dataclass

from subquad.tools.runs import common_options as common
from subquad.tools.runs.options import option

CROSSING = ("clustered-tail", "i-clustered", "clustered")  # whose crossovers doctor measures
MASKS = ("none", "causal")


@dataclass(frozen=True)
class CrossoverSettings:
    """The crossovers that `subquad doctor --measure` measures."""

    methods: tuple[str, ...] = option(CROSSING, f"{common.METHODS} Default: {' '.join(CROSSING)}.")
    lengths: tuple[int, ...] = option(
        tuple(round(128 * 2 ** (half / 2)) for half in range(13)),
        "Lengths in tokens, separated by commas; default: 128 to 8192 in steps of √2.",
        read=common.read_lengths,
    )
    dtypes: tuple[str, ...] = option(
        ("float32", "bfloat16"),
        "float32, bfloat16, float16, float64; separated by commas.",
        read=common.read_list,
        shown="float32,bfloat16",
    )
    masks: tuple[str, ...] = option(
        MASKS, "none, causal, or both separated by a comma; default: both.", read=common.read_list
    )
    heads: int = option(12, "Number of heads.")
    head_dim: int = option(64, "Width of each head.")
    device: str = option("cpu", common.DEVICE)
