"""How near to exact attention in fp32 does a swapped model stay in bf16, and with int8 weights?

    python benchmarks/small_numbers.py [--length 512] [--passages 6] [--rounds 5] [--methods "full i-clustered"]

The demo encoder (the `demo` extra) embeds passages of the documentation of Python's standard library with each method
in all layers, in fp32, in bf16, and with the int8 weights of torch's dynamic quantisation. Printed are the mean cosine
to the embeddings of exact attention in fp32, the size of the model's weights, and the median time of a passage divided
by that of exact attention in fp32, measured in turn. `--rounds 0` measures no times.
"""

import argparse
import copy
import io
import statistics
import warnings
from functools import partial

import torch
from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

from subquad import hf
from subquad.tools.data.texts import standard_library
from subquad.tools.measure.fidelity import cosine
from subquad.tools.measure.timing import interleaved
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import load

METHODS = "full clustered-tail:clusters=64,topk=96 i-clustered:clusters=25"


def with_int8(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favour of torchao, which is another package
        return quantize_dynamic(model, {torch.nn.Linear: per_channel_dynamic_qconfig})


NUMBERS = {"fp32": lambda model: model, "bf16": lambda model: model.to(torch.bfloat16), "int8 weights": with_int8}


def mib(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return len(file.getvalue()) / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--passages", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", default=METHODS)
    given = parser.parse_args()
    own = load(None)
    reading = read(own, standard_library(), given.length, 1, seed=0)
    items = reading.sequences(own, given.length, given.passages)
    own = own.reaching(given.length)
    exact = [own.embed([item]) for item in items]
    print(f"{len(items)} passages of {given.length:,} tokens\n")
    print("| method | numbers | cosine to exact attention in fp32 | MiB | time, exact attention in fp32 = 1 |")
    print("| --- | --- | --- | --- | --- |")
    for method in given.methods.split():
        for name, made in NUMBERS.items():
            model = made(copy.deepcopy(own.model))
            hf.swap(model, method)
            mine = own.with_model(model)
            near = statistics.mean(
                float(cosine(mine.embed([item]), want)) for item, want in zip(items, exact, strict=True)
            )
            took = "–"
            if given.rounds:
                calls = {"exact": partial(own.embed, items[:1]), "mine": partial(mine.embed, items[:1])}
                seconds = interleaved(calls, given.rounds)
                took = f"{statistics.median(seconds['mine']) / statistics.median(seconds['exact']):.2f}"
            print(f"| `{method}` | {name} | {near:.3f} | {mib(model):.0f} | {took} |", flush=True)


if __name__ == "__main__":
    main()
