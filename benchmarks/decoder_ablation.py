"""What each setting of causal by halves is worth in a decoder: next tokens beside exact attention, and multiply-adds.

    python benchmarks/decoder_ablation.py [--data FOLDER] [--lengths 4096] [--groups sizes …] [--figures FILE] [--out F]

FOLDER holds gutenberg/; the default is the environment variable SUBQUAD_DATA. Each variant changes the defaults of
"clustered-tail" as its name says. What is measured is appended to FILE, and what is there is not measured again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import decoder_passages
import sheet
import torch
from decoder_passages import Passage
from decoder_rules import TailByRule, TailOfVariant

from subquad.methods import Full, Method
from subquad.tools.measure.capture import recorded
from subquad.tools.measure.fidelity import relative_error
from subquad.tools.models.pretrained import Pretrained, load

LENGTHS = (4096,)
LAYERS = (0, 7, 15, 22, 29)  # whose error is measured

ABOUT = """\
SmolLM2-135M-Instruct, every layer, beside exact attention; over {passages} of each length.
KL is that of next-token distributions, exact ‖ method, in nats.
Error is ‖out − exact‖ / ‖exact‖ of the attention, mean of layers {layers}, on the inputs that exact attention has.
Work is in 10⁹ multiply-adds a head for the prompt: products of matrices alone, in rectangles, on the diagonal and in \
the last rows."""

DEFAULT = TailByRule()
VARIANT = TailOfVariant()
GROUPS: dict[str, dict[str, TailByRule]] = {
    "default": {"2√n clusters, 4√m keys, 32 cells, blocks of 1,024, 128 last rows": DEFAULT},
    "block": {f"blocks of {block:,}": replace(DEFAULT, block=block) for block in (256, 512, 2048)},
    "sizes": {
        f"{clusters:g}√n clusters, {keys:g}√m keys": replace(DEFAULT, cluster_factor=clusters, topk_factor=keys)
        for clusters, keys in ((1.0, 4.0), (1.41, 2.83), (1.41, 5.66), (2.83, 2.83), (2.83, 5.66), (2.0, 5.66))
    },
    "cells": {
        "16 cells": replace(DEFAULT, cells=16),
        "64 cells": replace(DEFAULT, cells=64),
        "√m cells: 32 at 1,024 keys, 64 at 4,096": replace(DEFAULT, cells_factor=1.0),
    },
    "rows": {"no last rows": replace(DEFAULT, last=0)},
    "k-means": {
        **{f"{count} rounds on vectors": replace(DEFAULT, refine=count) for count in (0, 1, 3)},
        **{f"{count} rounds on hashes": replace(DEFAULT, iterations=count) for count in (0, 3)},
    },
    "keys": {"top keys by weight alone": replace(VARIANT, by_distance=0)},
    "rope": {
        "cells before RoPE": replace(VARIANT, cells_space="content"),
        "cells without the 4 fastest pairs": replace(VARIANT, cells_without=4),
        "cells without the 8 fastest pairs": replace(VARIANT, cells_without=8),
        "cells without the 16 fastest pairs": replace(VARIANT, cells_without=16),
        "clusters without the 4 fastest pairs": replace(VARIANT, clusters_without=4),
        "clusters without the 8 fastest pairs": replace(VARIANT, clusters_without=8),
    },
}


def errors(pretrained: Pretrained, passage: Passage, methods: Mapping[str, Method]) -> dict[str, float]:
    """Of each method, the error of the attention, mean of `LAYERS`."""
    with recorded(pretrained.model) as calls:
        pretrained.prefill([passage.tokens])
    found = dict.fromkeys(methods, 0.0)
    with torch.inference_mode():
        for inputs in (calls[number] for number in LAYERS):
            exact = inputs.run(Full())
            for name, method in methods.items():
                found[name] += relative_error(inputs.run(method), exact) / len(LAYERS)
    return found


def table(
    pretrained: Pretrained, chosen: Sequence[Passage], methods: Mapping[str, TailByRule], figures: Path | None
) -> str:
    """Work, next tokens and error of each variant over the passages."""
    length = len(chosen[0].tokens)
    found = [errors(pretrained, passage, methods) for passage in chosen]
    rows = []
    for name, *numbers in decoder_passages.rows(pretrained, chosen, methods, figures):
        if name == "exact":
            rows.append([name, f"{length**2 * 64 / 1e9:.3f}", *numbers, "0"])
            continue
        error = sum(each[name] for each in found) / len(found)
        rows.append([name, f"{methods[name].products(length) / 1e9:.3f}", *numbers, f"{error:.4f}"])
    return sheet.table(["variant", "work", *decoder_passages.HEAD, "error"], rows)


def main() -> None:
    """Print a table for each length, and write them to a file where one is named."""
    parser = sheet.arguments(__doc__ or "", LENGTHS, data=decoder_passages.FOLDER, passages=2, groups=tuple(GROUPS))
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pretrained = load(decoder_passages.MODEL)
    methods = {name: method for group in arguments.groups for name, method in GROUPS[group].items()}
    parts = [ABOUT.format(layers=LAYERS, passages=decoder_passages.count_of(arguments.passages))]
    for length in arguments.lengths:
        chosen = decoder_passages.passages(pretrained, arguments.data, length, arguments.passages)
        parts += [f"## {length:,} tokens", table(pretrained, chosen, methods, arguments.figures)]
    sheet.publish("Ablation of causal by halves", parts, arguments.out)


if __name__ == "__main__":
    main()
