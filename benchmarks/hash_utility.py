"""Attention utility with buckets of N/B, with and without the queries that no bucket took.

    python benchmarks/hash_utility.py TEXT ADAPTER

ADAPTER is what `subquad calibrate --method lha:buckets=4` wrote for the encoder of the demo extra. The balanced buckets
of "lha" and "lsh" leave some queries out, which then attend in the bucket that they score highest. In the column "own"
such a query has utility 0, as in the paper; in "all" it has that of the bucket that it is given.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import sheet

from subquad.methods import BoundMethod, LearnedHash, RandomHash, Smyrf
from subquad.tools.data.texts import read_documents
from subquad.tools.measure.capture import recorded
from subquad.tools.measure.hooks import at_n_b
from subquad.tools.measure.utility import utilities
from subquad.tools.models.compare_rows import row_of_adapter
from subquad.tools.models.passages import read
from subquad.tools.models.pretrained import load


@dataclass(frozen=True)
class OwnHash(LearnedHash):
    """Only the queries that a bucket took."""

    def meetings(self, query, key, call):
        return super().meetings(query, key, call)[:1]


@dataclass(frozen=True)
class OwnRandom(RandomHash):
    """Only the queries that a bucket took."""

    def meetings(self, query, key, call):
        return super().meetings(query, key, call)[:1]


def compared(bound: BoundMethod, buckets: int) -> dict:
    """The measurements in one layer."""
    lean = at_n_b(bound)
    settings = {name: value for name, value in lean.method.to_dict().items() if name != "name"}
    sizes = {"heads": bound.heads, "kv_heads": bound.kv_heads, "head_dim": bound.head_dim}
    return {
        "lsh own": OwnRandom(buckets=buckets, enlarge=1.0),
        "lsh all": RandomHash(buckets=buckets, enlarge=1.0),
        "smyrf": Smyrf(clusters=buckets, rounds=1),
        "lha own": BoundMethod(OwnHash(**settings), **sizes, learned=bound.learned),
        "lha all": lean,
    }


def main(text: Path, adapter: Path, passages: int = 8) -> None:
    model = load(None)
    row = row_of_adapter(model, adapter)
    items = read(model, read_documents([text]), 512, passages, seed=0).passages
    sums = defaultdict(lambda: defaultdict(float))
    for item in items:
        with recorded(model.model) as calls:
            model.forward([item])
        for call in calls:
            methods = compared(row.bounds[call.number], row.method.buckets)
            options = {name: value for name, value in call.options.items() if name != "dropout_p"}
            keys = call.key.shape[2] // row.method.buckets
            bound, measured = utilities(methods, call.query, call.key, keys=keys, **options)
            figures = {"bound": bound} | {name: each.utility for name, each in measured.items()}
            for name, figure in figures.items():
                sums[call.number][name] += float(figure.mean()) / len(items)
                sums["mean"][name] += float(figure.mean()) / len(items) / len(calls)
    print("layer", *sums["mean"], sep="\t")
    for layer in [*(name for name in sums if name != "mean"), "mean"]:
        print(layer, *(f"{figure:.3f}" for figure in sums[layer].values()), sep="\t")


if __name__ == "__main__":
    sheet.run(main)
