"""Is it worth giving groups of one layer's heads their own settings in a plan?

    python benchmarks/head_groups.py [--lengths "2048 4096"] [--threads N] [--out FILE.md]

For each layer of the demo encoder and each method u of the plan's grid at that length: the fastest split of the heads
into two groups, with two methods of the grid, whose squared error over the layer's output is at most that of u in all
heads. A split is first predicted, with the time of h heads as h/H of the time of all heads. The best predicted split of
each layer is then measured in turn with u, with the copies that gather and scatter the heads of a group.
"""

import statistics
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import sheet
import torch
from torch import Tensor

from subquad.methods import Full, Method
from subquad.tools.data.texts import standard_library
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.measure.timing import Effort, speedup, until_steady
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import load
from subquad.tools.plan.grid import grid
from subquad.tools.plan.loads import text_load

EFFORT = Effort(seconds=1.5, least=7, enough=15, most=60)
HEAD = "| tokens | layer | all heads | error | heads | and heads | predicted gain | measured gain |"


class Split(NamedTuple):
    """Heads that run one method, and the others, which run a cheaper one."""

    close: Method
    cheap: Method
    heads: list[int]
    seconds: float


def head_errors(out: Tensor, exact: Tensor) -> Tensor:
    """The squared error of each head's output."""
    return (out - exact).double().square().sum((0, 2, 3))


def best_split(errors: dict[Method, Tensor], seconds: dict[Method, float], method: Method) -> Split | None:
    """The fastest split that is predicted to be no worse than one method in all heads; None: there is none."""
    H, accepted = len(errors[method]), float(errors[method].sum())
    best = None
    for close, cheap in permutations(errors, 2):
        if not seconds[cheap] < seconds[method] < seconds[close] and close != method:
            continue
        gain, order = (errors[cheap] - errors[close]).sort(descending=True)
        for count in range(1, H):
            total = float(errors[cheap].sum() - gain[:count].sum())
            time = (count * seconds[close] + (H - count) * seconds[cheap]) / H
            if total <= accepted and time < seconds[method] and (best is None or time < best.seconds):
                best = Split(close, cheap, sorted(order[:count].tolist()), time)
    return best


def run_split(inputs: LayerInputs, split: Split) -> Tensor:
    """The layer's output with the heads of a split."""
    others = [h for h in range(inputs.query.shape[1]) if h not in split.heads]
    out = torch.empty_like(inputs.query)
    for heads, method in ((split.heads, split.close), (others, split.cheap)):
        rows = torch.tensor(heads)
        q, k, v = (x.index_select(1, rows) for x in (inputs.query, inputs.key, inputs.value))
        out.index_copy_(1, rows, method(q, k, v, **inputs.options))
    return out


@torch.inference_mode()
def row_of(inputs: LayerInputs, length: int) -> str:
    """One layer: the split with the largest predicted gain, measured."""
    exact, methods = inputs.run(Full()), grid(length)
    errors = {method: head_errors(inputs.run(method), exact) for method in methods}
    timed = until_steady({m: partial(inputs.run, m) for m in methods}, EFFORT, exact.device)
    seconds = {method: statistics.median(timed[method]) for method in methods}
    total = {method: float(of.sum()) for method, of in errors.items()}
    front = [m for m in methods if not any(total[n] < total[m] and seconds[n] < seconds[m] for n in methods)]
    splits = {m: split for m in front if (split := best_split(errors, seconds, m)) is not None}
    if not splits:
        return f"| {length:,} | {inputs.number} | – | – | – | – | none | – |"
    method, split = max(splits.items(), key=lambda pair: seconds[pair[0]] / pair[1].seconds)
    both = {"all": partial(inputs.run, method), "split": partial(run_split, inputs, split)}
    taken = until_steady(both, EFFORT, exact.device)
    measured = speedup(taken["split"], taken["all"])
    predicted = seconds[method] / split.seconds
    error = (total[method] / float(exact.double().square().sum())) ** 0.5
    return (
        f"| {length:,} | {inputs.number} | `{method}` | {error:.3f} | {len(split.heads)} × `{split.close}` | "
        f"{exact.shape[1] - len(split.heads)} × `{split.cheap}` | {predicted:.2f}× | {measured:.2f}× |"
    )


@torch.inference_mode()
def rows_of(length: int) -> list[str]:
    """A row of the table for each layer."""
    pretrained = load(None)
    text = text_load(pretrained, read(pretrained, standard_library(), length, 1, 0), length)
    with recorded(text.model) as calls:
        text.run(text.items[0])
    return [row_of(inputs, length) for inputs in calls]


def main(lengths: tuple[int, ...] = (2048, 4096), out: Path | None = None) -> None:
    lines = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1)]
    for length in lengths:
        lines += rows_of(length)
    print("\n".join(lines))
    if out:
        out.write_text("# Groups of heads with methods of their own\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sheet.run(main)
