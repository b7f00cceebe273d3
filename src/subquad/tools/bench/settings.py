"""The settings of `subquad bench`, with their options on the command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subquad.tools.runs import common_options as common
from subquad.tools.runs.options import option

BENCHED = ("clustered", "i-clustered")
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


@dataclass(frozen=True)
class BenchSettings:
    """The settings of `bench`. The defaults are the clustered paper's: batch 1, 6 heads, D = 64."""

    methods: tuple[str, ...] = option(BENCHED, common.METHODS)
    plans: tuple[Path, ...] = option(
        (), "Folder of a plan from subquad plan: its methods, in place of the default ones; repeatable.", name="plan"
    )
    lengths: tuple[int, ...] = option(
        (256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384),
        "Lengths in tokens, separated by commas.",
        read=common.read_lengths,
    )
    passes: tuple[str, ...] = option(
        PASSES, "forward, forward+backward, or both separated by a comma; default: both.", read=common.read_list
    )
    dtypes: tuple[str, ...] = option(
        ("float32",),
        "float32, bfloat16, float16, float64; separated by commas; default: float32, and with --steps bfloat16 too.",
        read=common.read_list,
    )
    device: str = option("cpu", common.DEVICE)
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
