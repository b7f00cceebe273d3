"""Does it pay to keep the first token exact, or the first and the last?

    python benchmarks/keep.py TEXTS [--length 512] [--passages 6] [--rounds 5] [--methods "local smyrf"]

TEXTS is a folder of .txt files. The demo encoder (the `demo` extra) embeds the first tokens of its last files, by name,
with each method in all layers, without and with kept tokens. Printed are the mean cosine to the exact embeddings, and
the median time of a passage in the model divided by that of exact attention, measured in turn.
"""

import argparse
import copy
import statistics
from pathlib import Path

import torch

from subquad import hf
from subquad.methods import parse_method
from subquad.tools.measure.fidelity import cosine
from subquad.tools.measure.timing import interleaved
from subquad.tools.models.pretrained import load

METHODS = (
    "local:window=64 smyrf i-clustered:clusters=25,topk=32 i-clustered:clusters=100,topk=32 "
    "clustered-tail:clusters=64,topk=64,cells=16"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--passages", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    own = load(None)
    if given.length > own.limit:
        own = own.with_model(hf.extend_positions(copy.deepcopy(own.model), given.length))
    documents = [path.read_text("utf-8", "replace") for path in sorted(given.texts.glob("*.txt"), reverse=True)]
    ids = [own.content_ids(document) for document in documents]
    items = [own.wrap(some[: given.length - 2], given.length) for some in ids if len(some) >= given.length - 2]
    items = items[: given.passages]
    with torch.inference_mode():
        exact = [own.embed([item]) for item in items]
        print(f"{len(items)} passages of {given.length:,} tokens\n")
        print("| method | keep | cosine | time, exact attention = 1 |")
        print("| --- | --- | --- | --- |")
        for text in given.methods.split():
            for keep in (None, "first", "ends"):
                swapped = own.with_model(copy.deepcopy(own.model))
                hf.swap(swapped.model, parse_method(text), keep=keep)
                pairs = zip(items, exact, strict=True)
                near = statistics.mean(float(cosine(swapped.embed([item]), want)) for item, want in pairs)
                calls = {"exact": lambda: own.embed(items[:1]), "ours": lambda it=swapped: it.embed(items[:1])}
                seconds = interleaved(calls, given.rounds)
                took = statistics.median(seconds["ours"]) / statistics.median(seconds["exact"])
                print(f"| `{text}` | {keep or 'none'} | {near:.3f} | {took:.2f} |", flush=True)


if __name__ == "__main__":
    main()
