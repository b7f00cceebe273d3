"""Causal attention of one layer: methods by halves beside SDPA in the same dtype, forward and backward.

    python benchmarks/causal_attention.py --lengths "2048 4096" --model demo-decoder --text book.txt [--out FILE.md]

With a model and a text, the inputs are the query, key and value of one layer at the middle of the text, as far as the
model's positions reach. Longer inputs, and all inputs without a model, are standard normal: attention is then almost
uniform, which is not what a model's attention looks like.
"""

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import sheet
import torch
import torch.nn.functional as F
import typer
from torch import Tensor

import subquad as sq
from subquad import hf
from subquad.hf.rotary_trial import find_rotary
from subquad.tools.bench.calls import DTYPES
from subquad.tools.measure.capture import recorded
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.measure.timing import speedup, timed_rounds
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, load

SDPA = "SDPA"
EXACT = "full, with lse"  # exact attention as methods by halves run it on the diagonal
PASSES = ("forward", "forward+backward")
NOT_RUN = "not run"
HEAD = ("tokens", "inputs", "dtype", "pass", "method", "SDPA, ms", "speed-up", "error", "error of SDPA")

ABOUT = """\
One item, {heads} heads of {width} that share {key_heads} key heads, under a causal mask.
Speed-up is the median of the ratios SDPA / method, and SDPA's time the median, over {turns} turns, each of which runs \
SDPA and every method once in a new order; SDPA has the dtype of the method.
Error is ‖out − exact‖ / ‖exact‖ of the forward pass, where exact is SDPA's output in fp32 on inputs that are not \
rounded to the dtype.
`full, with lse` is exact attention that returns its log-sum-exp, as methods by halves run it on the diagonal: its \
speed-up is that of another kernel, not of an approximation.
Inputs are {inputs}.
Calls that are predicted to take more than {limit:g} s, from the length before, are not run."""


class Inputs(NamedTuple):
    """Query, key and value in fp32, their source, and the rotary positions by which they are turned."""

    source: str
    tensors: tuple[Tensor, ...]
    rotary: sq.Rotary | None = None


def normal_inputs(length: int, heads: int, key_heads: int, width: int) -> Inputs:
    """Standard normal query, key and value."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, length, width) for count in (heads, key_heads, key_heads)]
    return Inputs("random", tuple(torch.randn(shape, generator=generator) for shape in shapes))


def layer_inputs(pretrained: Pretrained, text: str, layer: int, length: int) -> Inputs:
    """Query, key and value of a layer, after RoPE, at the middle of a text."""
    item = read(pretrained, [text], 512, 1, 0).sequences(pretrained, length, 3)[1]
    with recorded(pretrained.model) as calls:
        pretrained.prefill([item])
    call, layers = calls[layer], hf.find_layers(pretrained.model)
    rotary = find_rotary(pretrained.model, [layers[layer]])[layers[layer].module]
    # The model makes inference tensors, which autograd refuses; their copies keep the strides that the model uses.
    return Inputs(f"layer {layer}", tuple(x.float().clone() for x in (call.query, call.key, call.value)), rotary)


def call_of(attend: Callable[..., Tensor], inputs: Sequence[Tensor], gradient: Tensor | None) -> Callable[[], Tensor]:
    """A forward pass, with the gradients of query, key and value if there is a gradient of the output."""
    attend = partial(attend, is_causal=True, enable_gqa=True)

    def forward() -> Tensor:
        with torch.inference_mode():
            return attend(*inputs)

    def forward_and_backward() -> Tensor:
        out = attend(*inputs)
        torch.autograd.grad(out, inputs, gradient)
        return out.detach()

    return forward if gradient is None else forward_and_backward


def exact_with_lse(*inputs: Tensor, **arguments: Any) -> Tensor:
    """The output of exact attention that returns its log-sum-exp, too."""
    return sq.attention(*inputs, method="full", return_lse=True, **arguments)[0]


class Panel:
    """One dtype and pass, measured at one length after the other: each length predicts the time at the next one."""

    def __init__(self, dtype: str, passes: str, methods: Sequence[str], limit: float):
        self.dtype, self.passes, self.limit = dtype, passes, limit
        self.attends = {SDPA: F.scaled_dot_product_attention, EXACT: exact_with_lse}
        self.attends |= {method: partial(sq.attention, method=sq.parse_method(method)) for method in methods}
        self.seconds: dict[str, tuple[int, float]] = {}  # the last length that was run, and the median there

    def predicted(self, name: str, length: int) -> float:
        """Seconds at this length, if time grows with the square of the length; 0 before the first length."""
        before, seconds = self.seconds.get(name, (length, 0.0))
        return seconds * (length / before) ** 2

    def rows(self, inputs: Inputs, exact: Callable[[], Tensor], rounds: int) -> list[list[str]]:
        """A row of the table for each method."""
        query, backward = inputs.tensors[0], PASSES.index(self.passes) == 1
        length = query.shape[2]
        generator = torch.Generator().manual_seed(1)
        gradient = torch.randn(query.shape, generator=generator).to(DTYPES[self.dtype]) if backward else None
        tensors = [x.to(DTYPES[self.dtype], copy=True).requires_grad_(backward) for x in inputs.tensors]
        names = [name for name in self.attends if self.predicted(name, length) <= self.limit]
        names = names if SDPA in names else []  # without SDPA's time there is no speed-up
        positions: dict[str, Any] = {"rotary": inputs.rotary}
        attends = {name: partial(self.attends[name], **({} if name == SDPA else positions)) for name in names}
        calls = {name: call_of(attends[name], tensors, gradient) for name in names}
        errors = {name: relative_error(call(), exact()) for name, call in calls.items()}  # these calls warm up, too
        seconds = timed_rounds(calls, rounds, random.Random(0))
        self.seconds |= {name: (length, statistics.median(each)) for name, each in seconds.items()}
        sdpa = f"{1e3 * self.seconds[SDPA][1]:,.1f}" if names else NOT_RUN
        rows = []
        for name in self.attends:
            results = [sdpa, NOT_RUN, sheet.MISSING, sheet.MISSING]
            if name in names:
                speed = speedup(seconds[name], seconds[SDPA])
                results = [sdpa, f"{speed:.2f}×", f"{errors[name]:.4f}", f"{errors[SDPA]:.4f}"]
            rows.append([f"{length:,}", inputs.source, self.dtype, self.passes, f"`{name}`", *results])
        return rows[1:]  # without SDPA's own


def main(
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768),
    methods: tuple[str, ...] = ("clustered-tail",),
    dtypes: tuple[str, ...] = ("float32",),
    passes: tuple[str, ...] = ("forward",),
    model: Annotated[str | None, typer.Option(help="whose layer gives the inputs, for example demo-decoder")] = None,
    text: Annotated[Path | None, typer.Option(help="what the model reads")] = None,
    layer: int = 15,
    heads: Annotated[int, typer.Option(help="of random inputs; with a model, the model's")] = 9,
    key_heads: int = 3,
    head_dim: int = 64,
    turns: int = 5,
    limit: Annotated[float, typer.Option(help="seconds of a call at most, as predicted")] = 30.0,
    out: Path | None = None,
) -> None:
    """Print a table, and write it to a file where one is named; its rows go to the standard error as they are made."""
    sheet.check_known("--passes", passes, PASSES)
    sheet.check_known("--dtypes", dtypes, DTYPES)
    if model and not text:
        raise typer.BadParameter("--model needs --text, which the model reads")
    lengths, shape = tuple(sorted(lengths)), (heads, key_heads, head_dim)
    pretrained, reach, kinds = None, 0, "standard normal"
    if model and text:
        pretrained, words = load(model), text.read_text("utf-8")
        shape, reach = hf.head_counts(hf.find_layers(pretrained.model)[0]), pretrained.limit or lengths[-1]
        kinds = f"those of layer {layer} of {pretrained.name}, after RoPE, at the middle of the text"
        kinds += f" up to {reach:,} tokens, and standard normal beyond"
    panels = [Panel(dtype, each, methods, limit) for dtype in dtypes for each in passes]
    rows = []
    for length in lengths:
        if pretrained is not None and length <= reach:
            inputs = layer_inputs(pretrained, words, layer, length)
        else:
            inputs = normal_inputs(length, *shape)
        exact = cache(call_of(F.scaled_dot_product_attention, inputs.tensors, None))
        for panel in panels:
            rows += panel.rows(inputs, exact, turns)
            print(*rows[-len(panel.attends) + 1 :], sep="\n", file=sys.stderr, flush=True)
    heads, key_heads, head_dim = shape
    about = ABOUT.format(heads=heads, key_heads=key_heads, width=head_dim, turns=turns, inputs=kinds, limit=limit)
    sheet.publish("Causal attention alone", [about, sheet.table(HEAD, rows)], out, ", ".join(dtypes))


if __name__ == "__main__":
    sheet.run(main)
