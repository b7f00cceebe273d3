"""A picture of benchmarks/results/plans.jsonl: what runs in each layer of the demo encoder at each length."""

import json
from pathlib import Path

from pictures.svg import FAINT, GREY, PALE_BLUE, PALE_GREEN, PALE_ORANGE, Picture
from subquad.methods.core.names import name_of

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "plans.jsonl"
TEXT, SEED = "novels", 0
FILLS = {"full": GREY, "clustered": PALE_BLUE, "i-clustered": PALE_ORANGE, "clustered-tail": PALE_GREEN}
SHORT = {"clusters": "clusters", "topk": "top keys", "cells": "cells"}


def plans() -> list[dict]:
    """The plans that were made on one text with one seed, from the shortest length on."""
    rows = [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()]
    chosen = [row for row in rows if row["on"] == TEXT and row["seed"] == SEED]
    return sorted(chosen, key=lambda row: row["length"])


def texts(method: str) -> list[str]:
    """A method with the settings that a square has room for."""
    if method == "full":
        return ["exact"]
    settings = dict(setting.split("=") for setting in method.partition(":")[2].split(","))
    return [name_of(method), *(f"{settings[name]} {word}" for name, word in SHORT.items() if name in settings)]


def plan() -> str:
    """Layers as columns and lengths as rows."""
    rows = plans()
    layers = list(rows[0]["chosen"])
    left, top, width, height = 112, 48, 108, 76
    about = (
        "The method that subquad plan chose for each of six layers of the demo encoder at 512 to 4,096 tokens, with "
        "the speed-up of the whole model and its fidelity. At 512 tokens three layers stay exact; the last layer "
        "always runs the cheapest method."
    )
    picture = Picture(
        left + width * len(layers) + 170, top + height * len(rows) + 44, "A plan by layer and length", about
    )
    for j, layer in enumerate(layers):
        picture.text(left + (j + 0.5) * width, top - 10, f"layer {layer}", anchor="middle", bold=True)
    after = left + len(layers) * width
    picture.text(after + 84, top - 10, "speed-up", anchor="end", bold=True)
    picture.text(after + 156, top - 10, "fidelity", anchor="end", bold=True)
    for i, row in enumerate(rows):
        y = top + i * height
        picture.text(left - 10, y + height / 2 + 4, f"{row['length']:,} tokens", anchor="end", bold=True)
        for j, layer in enumerate(layers):
            lines = texts(row["chosen"][layer])
            fill = FILLS[name_of(row["chosen"][layer])]
            picture.box(left + j * width + 2, y + 2, width - 4, height - 4, lines, fill=fill, size=11, bold=1)
        picture.text(after + 84, y + height / 2 + 4, f"{row['speedup']:.2f}×", anchor="end")
        picture.text(after + 156, y + height / 2 + 4, f"{1 - row['loss']:.4f}", anchor="end")
    source = (
        f"Demo encoder, planned on {TEXT} for a fidelity of {rows[0]['floor']} (mean cosine to the exact embeddings); "
        f"benchmarks/results/plans.jsonl, seed {SEED}."
    )
    picture.text(12, top + len(rows) * height + 26, source, size=11, fill=FAINT)
    return picture.svg()


# path below docs/assets/pictures -> what draws it
FILES = {"plan.svg": plan}
