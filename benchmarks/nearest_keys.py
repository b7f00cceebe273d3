"""Exact attention to each query's k nearest keys, which retrieval attentions approximate, against "clustered-tail".

    python benchmarks/nearest_keys.py [--data FOLDER] [--lengths "512 2048"] [--prompts 2048] [--out FILE.md]

FOLDER holds state_union/state_union.zip and gutenberg/; the default is the environment variable SUBQUAD_DATA. For the k
keys T_i with the largest logits of query i,

    out_i = Σ_{j ∈ T_i} softmax_{j ∈ T_i}(q_i·k_j / √D) v_j

which IceFormer (Mao et al. 2024, arXiv 2405.02842) and other attentions that retrieve keys approximate: what they find
is at best T_i. Queries, keys and values are those that exact attention has in the layers of the demo encoder, and, with
RoPE applied and causal, in layers of the demo decoder.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import decoder_passages
import sheet
import speeches
import torch

import subquad as sq
from subquad.methods import Full, Method
from subquad.methods.clustered_tail import OF_RECTANGLE, by_length, root
from subquad.methods.core.halves import LAST, default_block
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.models.pretrained import load

BLOCK = default_block(torch.float32)
KEYS = (20, 40, 80, 160, 320, 640)
TAIL = "clustered-tail"
BOOKS = 2  # passages of the decoder

ABOUT = """\
The error ‖out − exact‖ / ‖exact‖ of the attention output, mean of layers, when each query attends to its own k keys \
of largest logit and to nothing else.
IceFormer and other attentions that retrieve keys approximate this: what they find is at best these keys.
Only the approximation is compared: the nearest keys are found here from all logits, which takes quadratic time, so no \
time is given.
The encoder is the demo encoder (all-MiniLM-L6-v2), all six layers, on a speech of the State of the Union; beyond 512 \
tokens its positions are interpolated.
The decoder is SmolLM2-135M-Instruct, causal, with RoPE applied, layers {layers}, on {books} of two novels.
`clustered-tail` has its default settings; in brackets are the keys that a query meets exactly, mean of queries."""


class Inputs(NamedTuple):
    """Recorded calls of one model at one length."""

    title: str
    tokens: int
    causal: bool
    calls: Sequence[LayerInputs]


def encoder_inputs(data: Path, length: int) -> Inputs:
    """All layers of the demo encoder on one speech."""
    return Inputs(f"encoder, {length:,} tokens", length, False, speeches.passages(data, length, 1).inputs())


def decoder_inputs(data: Path, length: int) -> Inputs:
    """Some layers of the demo decoder on passages of books."""
    pretrained = load(decoder_passages.MODEL)
    calls: list[LayerInputs] = []
    for passage in decoder_passages.passages(pretrained, data, length, BOOKS):
        with recorded(pretrained.model) as layers:
            pretrained.prefill([passage.tokens])
        calls += [layers[number] for number in decoder_passages.LAYERS]
    return Inputs(f"decoder, {length:,} tokens", length, True, calls)


def errors(inputs: Inputs, methods: Mapping[str, Method]) -> dict[str, float]:
    """The error of each method, mean of the recorded calls."""
    exact = [call.run(Full()) for call in inputs.calls]
    return {
        name: statistics.fmean(
            relative_error(call.run(method), out) for call, out in zip(inputs.calls, exact, strict=True)
        )
        for name, method in methods.items()
    }


def exact_keys(tokens: int, causal: bool) -> float:
    """Keys that a query of the default `clustered-tail` meets exactly, mean of queries."""
    if not causal:
        return min(root(8 * tokens), tokens)  # half the keys of a decoder's rectangle
    return statistics.fmean(
        query + 1 if query >= tokens - LAST else query % BLOCK + 1 + top_keys(query // BLOCK) for query in range(tokens)
    )


def top_keys(block: int) -> int:
    """Top keys of the queries of a block in all rectangles before it: one for each power of two in its number."""
    powers = (2**level for level in range(block.bit_length()) if block >> level & 1)
    return sum(by_length(0, OF_RECTANGLE.topk, power * BLOCK, None)[0] for power in powers)


def needed(row: Mapping[int, float], error: float) -> str:
    """The number of nearest keys that reach an error."""
    enough = [keys for keys, own in row.items() if own <= error]
    if not enough:
        return f"more than {max(row)} nearest keys are needed for it"
    return f"of the numbers measured, {min(enough)} nearest keys reach it"


def main(
    lengths: tuple[int, ...] = (512, 2048),
    prompts: tuple[int, ...] = (2048,),
    keys: tuple[int, ...] = KEYS,
    data: Path = sheet.DATA_OR_LOCAL,
    out: Path | None = None,
) -> None:
    """Print the table, and write it to a file if one is named."""
    rows, sentences = [], []
    with torch.inference_mode():
        for read, sizes in ((encoder_inputs, lengths), (decoder_inputs, prompts)):
            for length in sizes:
                inputs = read(data, length)
                nearest = errors(inputs, {str(count): sq.OracleTopK(topk=count) for count in keys})
                tail = errors(inputs, {TAIL: sq.ClusteredTail()})[TAIL]
                met = exact_keys(inputs.tokens, inputs.causal)
                rows.append([inputs.title, *(f"{error:.3f}" for error in nearest.values()), f"{tail:.3f} ({met:,.0f})"])
                reached = needed({int(count): error for count, error in nearest.items()}, tail)
                sentences.append(f"- In the {inputs.title}, `{TAIL}` has an error of {tail:.3f}: {reached}.")
                print(rows[-1], flush=True)
    head = ["exact nearest keys", *map(str, keys), f"`{TAIL}`"]
    about = ABOUT.format(layers=", ".join(map(str, decoder_passages.LAYERS)), books=decoder_passages.count_of(BOOKS))
    parts = [about, sheet.table(head, rows), "\n".join(sentences)]
    sheet.publish("Exact nearest keys", parts, out)


if __name__ == "__main__":
    sheet.run(main)
