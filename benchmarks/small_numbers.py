"""The closeness of a swapped model in bf16, and with int8 weights, to exact attention in fp32.

    python benchmarks/small_numbers.py [--lengths "512 2048"] [--passages 6] [--rounds 7] [--methods …] [--out FILE.md]

The demo encoder (the `demo` extra) embeds passages of the documentation of Python's standard library with each method
in all layers, in fp32, in bf16, and with the int8 weights of torch's dynamic quantisation. `--rounds 0` measures no
times.
"""

import copy
import io
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import sheet
import torch
from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

from subquad import hf
from subquad.methods import parse_method
from subquad.tools.data.texts import standard_library
from subquad.tools.measure.fidelity import cosine
from subquad.tools.measure.timing import timed_rounds
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, load

METHODS = ("full", "full:kernel=subquad", "clustered-tail:clusters=64,topk=96", "i-clustered:clusters=25")
ABOUT = """\
The cosine is that of the demo encoder's embeddings to those of exact attention in fp32, mean of passages of the \
documentation of Python's standard library; beyond 512 tokens, the encoder's positions are interpolated.
The time is that of the whole model for one passage, divided by its time with exact attention (SDPA) in fp32: the \
ratio of the medians of {rounds} rounds, in each of which both run once."""


def with_int8(model: torch.nn.Module) -> torch.nn.Module:
    """The model with linear layers whose weights are int8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of torchao, which is another package
        return quantize_dynamic(model, {torch.nn.Linear: per_channel_dynamic_qconfig})


NUMBERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "fp32": lambda model: model,
    "bf16": lambda model: model.to(torch.bfloat16),
    "int8 weights": with_int8,
}


def mib(model: torch.nn.Module) -> float:
    """The size of the model's file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return len(file.getvalue()) / 2**20


def rows(encoder: Pretrained, items: list[list[int]], method: str, rounds: int) -> list[list[str]]:
    """A method in each kind of numbers: size, cosine, time."""
    exact, found = [encoder.embed([item]) for item in items], []
    for name, made in NUMBERS.items():
        model = made(copy.deepcopy(encoder.model))
        hf.swap(model, parse_method(method))
        swapped = encoder.with_model(model)
        near = statistics.mean(
            float(cosine(swapped.embed([item]), want)) for item, want in zip(items, exact, strict=True)
        )
        took = sheet.MISSING
        if rounds:
            calls = {"exact": partial(encoder.embed, items[:1]), "swapped": partial(swapped.embed, items[:1])}
            seconds = {call: statistics.median(each) for call, each in timed_rounds(calls, rounds).items()}
            took = f"{seconds['swapped'] / seconds['exact']:.2f}"
        found.append([f"`{method}`", name, f"{mib(model):.0f}", f"{near:.3f}", took])
    return found


def main(
    lengths: tuple[int, ...] = (512, 2048),
    passages: int = 6,
    rounds: int = 7,
    methods: tuple[str, ...] = METHODS,
    out: Path | None = None,
) -> None:
    own, parts = load(None), [ABOUT.format(rounds=rounds)]
    head = ["method", "dtype or weights", "size of the model, MiB", "cosine", "time"]
    for length in lengths:
        items = read(own, standard_library(), length, 1, seed=0).sequences(own, length, passages)
        longer = own.reaching(length)
        table = [row for method in methods for row in rows(longer, items, method, rounds)]
        parts += [f"## {length:,} tokens, {len(items)} passages", sheet.table(head, table)]
    sheet.publish("bf16 and int8 weights in the demo encoder", parts, out, "fp32, bf16 and int8")


if __name__ == "__main__":
    sheet.run(main)
