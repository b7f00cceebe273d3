"""The parts of the time of one generated token: products with weights, attention, cache, masks, and everything else.

    python benchmarks/profile_step.py [--lengths "512 7900"] [--dtypes "bfloat16 float32"] [--methods "own …"]
        [--caches "dynamic growing"] [--batch 1] [--shortest 0] [--steps 5] [--out FILE.md]

The model and the caches are those of caches.py. With `--shortest`, the requests of a batch have lengths from there to
the length of the row, padded on the left. A part's time is that of its calls, less other parts inside; the last
column is a step without these clocks. "kernel" is SDPA or the compiled library; "around it" is what
else transformers and subquad do in attention, such as repeating keys for SDPA.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import sheet
import torch
import transformers
import typer
from caches import OWN, Steps, fill, load, padding, spread, variants
from transformers.models.llama import modeling_llama

import subquad as sq
from subquad.kernels.native import interface

IMPLEMENTATIONS = ("sdpa", sq.hf.ATTACHED)
PARTS = ("products with weights", "attention: kernel", "attention: around it", "cache", "masks", "the rest")
CACHES = {"dynamic": lambda model: transformers.DynamicCache(config=model.config), "growing": sq.hf.GrowingCache}


class Clock:
    """Seconds by part; those of a call inside another count for the inner one alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.running: list[str] = []
        self.since = 0.0

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose time counts for a part."""

        def timed(*args: Any, **options: Any) -> Any:
            self._switch_to(part)
            try:
                return function(*args, **options)
            finally:
                self._switch_to(None)

        return timed

    def _switch_to(self, part: str | None) -> None:
        now = time.perf_counter()
        if self.running:
            self.seconds[self.running[-1]] += now - self.since
        if part is None:
            self.running.pop()
        else:
            self.running.append(part)
        self.since = now


@contextmanager
def clocks(model: Any, cache: Any) -> Iterator[Clock]:
    """Put clocks around the parts of a model's steps on this cache."""
    clock, functions = Clock(), transformers.AttentionInterface()
    before = {name: functions[name] for name in IMPLEMENTATIONS}
    calls = [(module, "forward", PARTS[0]) for module in model.modules() if isinstance(module, torch.nn.Linear)]
    calls += [(torch.nn.functional, "scaled_dot_product_attention", PARTS[1]), (interface, "run", PARTS[1])]
    calls += [(cache, "update", PARTS[3]), (modeling_llama, "create_causal_mask", PARTS[4])]
    repeated = interface.repeated  # which makes a function for all layers of a pass

    def timed_kernel(*args: Any, **options: Any) -> Callable[..., Any]:
        return clock.around(PARTS[1], repeated(*args, **options))

    with ExitStack() as stack:
        stack.enter_context(patch.object(interface, "repeated", timed_kernel))
        for owner, name, part in calls:
            stack.enter_context(patch.object(owner, name, clock.around(part, getattr(owner, name))))
        for name, function in before.items():
            transformers.AttentionInterface.register(name, clock.around(PARTS[2], function))
            stack.callback(transformers.AttentionInterface.register, name, function)
        yield clock


def parts_of(model: Any, step: Steps, count: int) -> list[float]:
    """Milliseconds of each part, and of a step without clocks; medians."""
    alone, rounds = Clock(), []
    with clocks(model, step.cache) as clock:
        inside = clock.around(PARTS[5], step)
        for _ in range(count + 2):
            clock.seconds.clear()
            inside()
            rounds.append([clock.seconds[part] for part in PARTS])
    outside = alone.around("step", step)
    for each in rounds:
        alone.seconds.clear()
        outside()
        each.append(alone.seconds["step"])
    return [1e3 * statistics.median(part) for part in zip(*rounds[2:], strict=True)]


def main(
    lengths: tuple[int, ...] = (512, 7900),
    methods: tuple[str, ...] = (OWN, "full:kernel=subquad"),
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
    caches: tuple[str, ...] = ("dynamic",),
    batch: int = 1,
    shortest: int = 0,
    steps: int = 5,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="A small random model.")] = False,
    out: Path | None = None,
) -> None:
    """Print the table, and write it if --out is given."""
    torch.manual_seed(0)
    rows = []
    for dtype_name in dtypes:
        dtype = getattr(torch, dtype_name)
        models = variants(load(dtype, dry_run), list(methods))
        for length in lengths:
            for kind in caches:
                for method, model in models.items():
                    with torch.inference_mode():
                        cache = fill(CACHES[kind](model), model.config, batch, length, dtype)
                    mask = padding(spread(min(shortest or length, length), length, batch))
                    step = Steps(model, model.forward, cache, mask)
                    ms = parts_of(model, step, steps)
                    rows.append([f"{length:,}", dtype_name, kind, f"`{method}`", *(f"{part:.2f}" for part in ms)])
    head = ["tokens before", "dtype", "cache", "attention", *PARTS, "without clocks"]
    several = "" if batch == 1 else f" of {batch} requests together"
    if shortest:
        several += f", the shortest of {shortest:,} tokens and padded on the left"
    about = f"Milliseconds of a step{several}, a token after those in the cache; medians. Clocks take time themselves."
    parts = [about, sheet.table(head, rows)]
    sheet.publish("Where the time of a step goes", parts, out, "bf16 and fp32")


if __name__ == "__main__":
    sheet.run(main)
