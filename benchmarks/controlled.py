"""The cost and the error of controlled attention and of fixed settings, on real queries, keys and values.

    python benchmarks/controlled.py [--data FOLDER] [--lengths "512 …"] [--rounds 3] [--out FILE.md]

FOLDER holds state_union/; the default is the environment variable SUBQUAD_DATA. The encoder of the demo extra reads a
speech; layers 0, 2 and 4 are computed again by each contender.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import sheet
import speeches
import torch

import subquad as sq
from subquad.audits.controlled import stages_of
from subquad.audits.exact_rows import relative_errors
from subquad.methods import ClusteredTail, Full, Method
from subquad.tools.measure.capture import LayerInputs

LAYERS = [0, 2, 4]
TOLERANCES = (0.02, 0.1, 0.3, 1.0)


def seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median processor time of each call, which run in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(own) for name, own in times.items()}


def length_table(inputs: list[LayerInputs], rounds: int) -> str:
    N = inputs[0].query.shape[2]
    fixed: list[Method] = [*stages_of(ClusteredTail(), N, N)]
    contenders = {str(method): method for method in fixed}
    contenders |= {f"Controlled, tolerance {tolerance}": sq.Controlled(tolerance=tolerance) for tolerance in TOLERANCES}
    took, errors, heads = (
        dict.fromkeys(contenders, 0.0),
        {name: [] for name in contenders},
        dict.fromkeys(contenders, ""),
    )
    stages: dict[str, list[torch.Tensor]] = {}
    for layer in inputs:
        how = {name: layer.options[name] for name in ("mask", "scale", "bias")}
        exact = Full()(layer.query, layer.key, layer.value, **how).flatten(0, 2)
        for name, method in contenders.items():
            out = method(layer.query, layer.key, layer.value, **how)
            if isinstance(method, sq.Controlled):
                out, spent = out
                stages.setdefault(name, []).append(torch.bincount(spent.stage.flatten(), minlength=len(spent.stages)))
            errors[name].append(relative_errors(out.flatten(0, 2), exact))
        calls = {
            name: partial(method, layer.query, layer.key, layer.value, **how) for name, method in contenders.items()
        }
        for name, each in seconds(calls, rounds).items():
            took[name] += each
    rows = []
    for name in contenders:
        every = torch.cat(errors[name])
        heads = " · ".join(map(str, sum(stages[name]).tolist())) if name in stages else sheet.MISSING
        shares = [f"{100 * float((every > tolerance).double().mean()):.2f} %" for tolerance in TOLERANCES]
        rms = float(every.square().mean().sqrt())
        rows.append([name, f"{took[name] / took['full']:.2f}", heads, f"{rms:.3f}", *shares])
    head = ["attention", "time / exact", "heads by stage", "root mean e²", *(f"e > {each}" for each in TOLERANCES)]
    return sheet.table(head, rows)


def main(
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096),
    data: Path = sheet.DATA,
    rounds: int = 3,
    out: Path | None = None,
) -> None:
    parts = [
        "Processor time of the attention of layers 0, 2 and 4 (12 heads of 32) on one speech, divided by exact "
        f"attention's; median of {rounds} rounds, in turn. Heads by stage: of 36, how many stayed at each stage; "
        "the stages are the fixed settings above, in their order. Errors are those of all rows, not of sampled ones."
    ]
    for length in lengths:
        inputs = speeches.passages(data, length, 1).inputs(LAYERS)
        with torch.inference_mode():
            parts += [f"## {length:,} tokens", length_table(inputs, rounds)]
    sheet.publish("Controlled attention", parts, out)


if __name__ == "__main__":
    sheet.run(main)
