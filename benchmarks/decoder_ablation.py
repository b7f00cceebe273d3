"""Ablation of causal attention by halves in a decoder: next tokens compared with exact attention, and multiply-adds.

    python benchmarks/decoder_ablation.py [--data FOLDER] [--lengths 4096] [--groups "sizes …"] [--prefills "sizes …"]
        [--passages 2] [--readings 1] [--out FILE.md]

FOLDER holds gutenberg/; the default is the environment variable SUBQUAD_DATA. Each variant changes the defaults of
"clustered-tail" as its name says. The error of the attention is measured for the variants of GROUPS, and the next
tokens, which take a prefill of the whole model each, for those of PREFILLS over the first READINGS passages.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import decoder_passages
import sheet
from decoder_passages import HEAD, LAYERS, MODEL, error_texts, next_token_texts
from decoder_rules import WIDTH, TailByRule, TailOfVariant

from subquad.tools.models.next_tokens import NextTokens
from subquad.tools.models.pretrained import load

LENGTHS = (4096,)

ABOUT = """\
SmolLM2-135M-Instruct, every layer, beside exact attention; next tokens over {readings} of each length, errors over \
{passages}.
KL is that of next-token distributions, exact ‖ method, in nats.
Error is ‖out − exact‖ / ‖exact‖ of the attention, mean of layers {layers}, on the inputs that exact attention has.
Work is in 10⁹ multiply-adds a head for the prompt: products of queries, means, keys and values, in rectangles, on the \
diagonal and in the last rows; covariances are not counted."""

DEFAULT = TailByRule()
VARIANT = TailOfVariant()
GROUPS: dict[str, dict[str, TailByRule]] = {
    "default": {"n^¾/√32 clusters, m^¾ keys, 32 cells, blocks of 1,024, 128 last rows": DEFAULT},
    "sizes": {
        f"{clusters:g}√n clusters, {keys:g}√m keys": replace(DEFAULT, cluster_factor=clusters, topk_factor=keys)
        for clusters, keys in ((1.0, 2.83), (1.0, 4.0), (1.41, 4.0), (1.41, 5.66), (2.0, 4.0), (2.0, 5.66))
    },
    "queries": {
        "queries of each block by themselves": replace(DEFAULT, queries="block"),
        "queries of each block by themselves, 1.41√n clusters": replace(DEFAULT, queries="block", cluster_factor=1.41),
    },
    "keys": {
        "top keys by weight times distance": replace(VARIANT, keys_by="distance"),
        "top keys by weight alone": replace(VARIANT, keys_by="weight"),
    },
    "block": {f"blocks of {block:,}": replace(DEFAULT, block=block) for block in (256, 512, 2048)},
    "cells": {
        "16 cells": replace(DEFAULT, cells=16),
        "64 cells": replace(DEFAULT, cells=64),
        "√m cells: 32 at 1,024 keys, 46 at 2,048": replace(DEFAULT, cells_factor=1.0),
    },
    "rows": {"no last rows": replace(DEFAULT, last=0)},
    "k-means": {
        **{f"k-means on vectors, rounds: {count}": replace(DEFAULT, refine=count) for count in (0, 1, 3)},
        **{f"k-means on hashes, rounds: {count}": replace(DEFAULT, iterations=count) for count in (0, 3)},
    },
    "rope": {
        "cells before RoPE": replace(VARIANT, cells_space="content"),
        "cells without the 4 fastest pairs": replace(VARIANT, cells_without=4),
        "cells without the 8 fastest pairs": replace(VARIANT, cells_without=8),
        "cells without the 16 fastest pairs": replace(VARIANT, cells_without=16),
        "clusters without the 4 fastest pairs": replace(VARIANT, clusters_without=4),
        "clusters without the 8 fastest pairs": replace(VARIANT, clusters_without=8),
    },
}


def table(tokens: Mapping[str, list[NextTokens]], errors: Mapping[str, list[list[float]]], length: int) -> str:
    """Work, next tokens where they are measured, and error of each variant."""
    methods = {name: method for group in GROUPS.values() for name, method in group.items()}
    rows = [["exact", f"{length**2 * WIDTH / 1e9:.3f}", *next_token_texts(tokens["exact"]), *["0"] * (len(LAYERS) + 1)]]
    for name, numbers in errors.items():
        texts = next_token_texts(tokens[name]) if name in tokens else [sheet.MISSING] * len(HEAD)
        rows.append([name, f"{methods[name].products(length) / 1e9:.3f}", *texts, *error_texts(numbers)])
    return sheet.table(["variant", "work", *HEAD, *(f"error in layer {layer}" for layer in LAYERS), "mean"], rows)


def main(
    lengths: tuple[int, ...] = LENGTHS,
    data: Path = sheet.DATA,
    groups: tuple[str, ...] = tuple(GROUPS),
    prefills: tuple[str, ...] = tuple(GROUPS),
    passages: int = 2,
    readings: int = 2,
    out: Path | None = None,
) -> None:
    """Print a table for each length, and write them to a file where one is named."""
    pretrained = load(MODEL)
    methods, run = (
        {name: method for group in names for name, method in GROUPS[group].items()} for names in (groups, prefills)
    )
    count_of = decoder_passages.count_of
    parts = [ABOUT.format(layers=LAYERS, passages=count_of(passages), readings=count_of(readings))]
    for length in lengths:
        chosen = decoder_passages.passages(pretrained, data, length, passages)
        errors = [decoder_passages.errors(pretrained, passage, methods) for passage in chosen]
        read = chosen[:readings]
        tokens = [decoder_passages.next_tokens(pretrained, passage, run) for passage in read]
        columns = ({name: [each[name] for each in results] for name in results[0]} for results in (tokens, errors))
        parts += [f"## {length:,} tokens", table(*columns, length)]
    sheet.publish("Ablation of causal by halves", parts, out)


if __name__ == "__main__":
    sheet.run(main)
