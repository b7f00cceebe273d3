"""The closeness of a swapped model in bf16, and with int8 weights, to exact attention in fp32.

    python benchmarks/small_numbers.py [--lengths "512 2048"] [--passages 6] [--rounds 7] [--methods …] [--out FILE.md]
    python benchmarks/small_numbers.py --model demo-decoder --lengths 2048

The demo encoder embeds passages of the documentation of Python's standard library, or a decoder reads them, with each
method in all layers and each of the numbers of `rounded_weights.py`, of which those of torchao are left out where that
package is not installed. `--rounds 0` measures no times.
"""

import io
import statistics
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import sheet
import torch
from rounded_weights import ROUNDINGS, rounded

from subquad import hf
from subquad.methods import parse_method
from subquad.tools.data.texts import standard_library
from subquad.tools.measure.fidelity import cosine
from subquad.tools.measure.timing import timed_rounds
from subquad.tools.models.next_tokens import differences, next_of, prefill, summed
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import Pretrained, load

METHODS = ("full", "full:kernel=subquad", "clustered-tail:clusters=64,topk=96", "i-clustered:clusters=25")
STEP = 8  # one of so many positions of a prompt is compared

PASSAGES = "passages of the documentation of Python's standard library"
FIDELITY = {
    "encoder": f"The cosine is that of {{name}}'s embeddings to those of exact attention in fp32, mean of {PASSAGES}; "
    "beyond the encoder's positions, these are interpolated.",
    "decoder": f"The KL divergence, in nats, and the share of the same most likely token are those of {{name}}'s "
    f"next-token distributions compared with exact attention in fp32, at one of {STEP} positions of {PASSAGES}.",
}
TIME = """\
The time is that of the whole model for one passage, divided by its time with exact attention (SDPA) in fp32: the \
ratio of the medians of {rounds} rounds, in each of which both run once."""


def mib(model: torch.nn.Module) -> float:
    """The size of the model's file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return len(file.getvalue()) / 2**20


def cosines(exact: Pretrained, other: Pretrained, items: Sequence[list[int]]) -> list[str]:
    """The mean cosine of embeddings."""
    pairs = ((exact.embed([item]), other.embed([item])) for item in items)
    return [f"{statistics.mean(float(cosine(mine, wanted)) for wanted, mine in pairs):.3f}"]


@torch.inference_mode()
def next_tokens(exact: Pretrained, other: Pretrained, items: Sequence[list[int]]) -> list[str]:
    """The KL divergence of next tokens, and the share of positions with the same most likely one."""
    sums = []
    for item in items:
        batch = exact.batch([item])
        runs = {name: prefill(each.model, batch).every(STEP) for name, each in (("exact", exact), ("other", other))}
        tokens, counted = (x[:, (len(item) - 1) % STEP :: STEP] for x in next_of(batch))
        sums.append(differences(runs, "exact", tokens, counted)["other"])
    return [f"{summed(sums).mean_kl:.4f}", f"{summed(sums).agreement:.3f}"]


def run(model: Pretrained, item: list[int]) -> None:
    """The work that is timed: an embedding, or a prefill with the logits of the last token."""
    if model.is_causal_lm:
        with torch.inference_mode():
            prefill(model.model, model.batch([item]))
    else:
        model.embed([item])


def rows(exact: Pretrained, items: Sequence[list[int]], method: str, rounds: int) -> list[list[str]]:
    """A method in each kind of numbers: size, fidelity, time."""
    lines = []
    for kind in ROUNDINGS:
        if "torchao" in kind and find_spec("torchao") is None:
            continue
        model = rounded(exact.model, kind)
        hf.swap(model, parse_method(method))
        other = exact.with_model(model)
        fidelity = (next_tokens if exact.is_causal_lm else cosines)(exact, other, items)
        ratio = sheet.MISSING
        if rounds:
            calls = {"exact": partial(run, exact, items[0]), "other": partial(run, other, items[0])}
            seconds = {call: statistics.median(each) for call, each in timed_rounds(calls, rounds).items()}
            ratio = f"{seconds['other'] / seconds['exact']:.2f}"
        lines.append([f"`{method}`", kind, f"{mib(model):.0f}", *fidelity, ratio])
    return lines


def main(
    model: str = "demo-encoder",
    lengths: tuple[int, ...] = (512, 2048),
    passages: int = 6,
    rounds: int = 7,
    methods: tuple[str, ...] = METHODS,
    out: Path | None = None,
) -> None:
    pretrained = load(model)
    kind = "decoder" if pretrained.is_causal_lm else "encoder"
    parts = [FIDELITY[kind].format(name=pretrained.name) + "\n" + TIME.format(rounds=rounds)]
    fidelity = ["KL divergence", "same token"] if pretrained.is_causal_lm else ["cosine"]
    head = ["method", "dtype or weights", "size of the model, MiB", *fidelity, "time"]
    for length in lengths:
        items = read(pretrained, standard_library(), length, 1, seed=0).sequences(pretrained, length, passages)
        exact = pretrained.reaching(length)
        table = [row for method in methods for row in rows(exact, items, method, rounds)]
        parts += [f"## {length:,} tokens, {len(items)} passages", sheet.table(head, table)]
    sheet.publish(f"bf16 and int8 weights in {pretrained.name}", parts, out, "fp32, bf16 and int8")


if __name__ == "__main__":
    sheet.run(main)
