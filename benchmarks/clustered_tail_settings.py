"""The clusters, top keys and cells that "clustered-tail" needs for a given fidelity, from 512 to 8,192 tokens.

    python benchmarks/clustered_tail_settings.py [--data FOLDER] [--lengths "512 …"] [--figures FILE] [--out FILE.md]

FOLDER holds state_union/state_union.zip; the default is the environment variable SUBQUAD_DATA. The encoder of the demo
extra reads speeches with many settings; fidelity is the cosine of its embeddings to the exact ones. What is measured is
appended to FILE, and what is there is not measured again.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import sheet
import speeches
import torch
from torch import Tensor

import subquad as sq
from subquad.kernels.attention.tail.key_choice import covariance_in_clusters, terms_of_keys
from subquad.kernels.selection.blocks.op import by_bucket
from subquad.kernels.selection.cells.op import key_cells
from subquad.kernels.selection.cells.reference import BITS as CELL_BITS
from subquad.kernels.selection.clusters.op import query_clusters
from subquad.kernels.selection.group_means import group_mean
from subquad.methods import ClusteredTail
from subquad.methods.core.method import Call, Partial
from subquad.tools.measure.capture import LayerInputs
from subquad.tools.measure.fidelity import cosine, relative_error
from subquad.tools.models.pretrained import running

FIGURES = Path(__file__).parent / "results" / "clustered-tail-settings.jsonl"
LENGTHS = {512: 6, 1024: 4, 2048: 3, 4096: 2, 8192: 1}  # and how many speeches are read
CLUSTERS = (32, 64, 96, 128, 192, 256, 362)
TOPK = (16, 32, 64, 96, 128)
CELLS = (8, 16, 32)
MORE = {512: ((32, 64, 64),), 1024: ((45, 90, 16), (45, 90, 32), (45, 90, 64), (90, 64, 16))}  # beside the grid
# Lengths at which a reading takes too long for the whole grid: clusters, top keys and cells that are tried
LONG = {
    2048: (
        *((64, 64, 16), (64, 128, 16), (64, 128, 32), (64, 128, 64), (64, 192, 16)),
        *((96, 96, 16), (128, 64, 16), (128, 128, 16), (128, 128, 32)),
    ),
    4096: (
        *((64, 64, 32), (64, 128, 32), (90, 181, 16), (90, 181, 32), (90, 181, 64)),
        *((128, 128, 16), (128, 192, 16), (181, 64, 16), (181, 128, 16), (256, 128, 16)),
    ),
    8192: (
        *((90, 181, 32), (128, 256, 16), (128, 256, 32), (128, 256, 64), (181, 256, 16)),
        *((256, 64, 16), (256, 128, 16), (362, 128, 16), (256, 256, 64)),
    ),
}
EVERY = 3  # of the heads at these lengths, for the error
LEAST = (0.99, 0.995, 0.998)
LAYERS = [0, 2, 4]  # whose error is measured
ERRORS = (0.02, 0.25)  # between these lie the cosines that are of interest
BLOCK = 16  # queries of one cluster that meet its keys together


ABOUT = """\
How clusters (C), top keys (k) and cells (X) trade fidelity for work in the demo encoder (12 heads of 32) on speeches \
of the State of the Union.
Multiply-adds are those of the attention calls in percent of exact attention's, the choice of clusters and cells \
included.
The error is ‖out − exact‖ / ‖exact‖ of layers 0, 2 and 4, mean of layers, on one speech; from 2,048 tokens on of \
every third head.
The cosine is that of the embedding to the exact one, mean of speeches, and the least of them.
Beyond 512 tokens the encoder's positions are interpolated.
Up to 1,024 tokens the cosine is measured on the Pareto front of error and multiply-adds over a grid of 105 settings; \
beyond, only the settings listed were tried."""


class Setting(NamedTuple):
    """The settings of "clustered-tail", in the order of its fields."""

    clusters: int
    topk: int
    cells: int


RULES: dict[str, Callable[[int], Setting]] = {
    "C = √(8N), k = 64, X = 16": lambda N: Setting(math.isqrt(8 * N), 64, 16),
    "C = √(2N), k = √(8N), X = 16": lambda N: Setting(math.isqrt(2 * N), math.isqrt(8 * N), 16),
    "C = √(2N), k = √(8N), X = 32": lambda N: Setting(math.isqrt(2 * N), math.isqrt(8 * N), 32),
    "C = √(2N), k = √(8N), X = 64": lambda N: Setting(math.isqrt(2 * N), math.isqrt(8 * N), 64),
}


@dataclass(frozen=True)
class Dense(ClusteredTail):
    """The same computation on dense matrices of clusters by keys, head by head: much faster than the reference.

    For real items without padding, in fp32.
    """

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        labels = clustered(query, key, self.clusters)
        cell = key_cells(key, value, None, cells=self.cells, seed=0)
        return attention(query, key, value, labels, cell, self, call.scale), None


def clustered(query: Tensor, key: Tensor, clusters: int) -> Tensor:
    """The clusters of queries of the default settings."""
    how = {name: ClusteredTail.defaults()[name] for name in ("bits", "iterations", "refine", "seed")}
    return query_clusters(query, key, None, None, space="logits", clusters=min(clusters, query.shape[2]), **how)


def attention(
    query: Tensor, key: Tensor, value: Tensor, labels: Tensor, cell: Tensor, method: ClusteredTail, scale: float
) -> Tensor:
    """Attention with these labels of queries and cells of keys."""
    clusters = min(method.clusters, query.shape[2])
    means = group_mean(query, labels, clusters)
    around = covariance_in_clusters(query, labels, means)
    terms = terms_of_keys(key, cell, around, method.cells, scale)
    blocks, of = by_bucket(labels, clusters, BLOCK)
    out = value.new_empty(*query.shape[:3], value.shape[3])
    for b, h in itertools.product(range(query.shape[0]), range(query.shape[1])):
        both = torch.cat([key[b, h], value[b, h]], -1)
        met = tops_and_tail(means[b, h], both, terms[b, h], cell[b, h], key.shape[3], method.topk, method.cells, scale)
        out[b, h] = members(query[b, h], *met, blocks[b, h], of[b, h], scale)
    return out


def tops_and_tail(
    means: Tensor, both: Tensor, terms: Tensor, cell: Tensor, width: int, topk: int, cells: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The keys of each cluster's members: rows [k, v] of top keys and cells, and what is added to their logits."""
    logits = scale * means @ both[:, :width].T
    top = (logits + terms).topk(min(topk, both.shape[0]), sorted=False).indices
    largest = logits.amax(1, keepdim=True)
    weights = (logits - largest).exp_().scatter_(1, top, 0.0)
    order = cell.argsort()
    starts = [0, *torch.bincount(cell, minlength=cells).cumsum(0).tolist()]
    rows, bias = [both[top]], [logits.new_zeros(top.shape)]
    weights, ordered = weights[:, order], both[order]
    for start, end in itertools.pairwise(starts):
        mass = weights[:, start:end].sum(1, keepdim=True)
        centroid = weights[:, start:end] @ ordered[start:end] / mass.clamp(min=1e-37)
        own = scale * (means * centroid[:, :width]).sum(1, keepdim=True)
        rows.append(centroid[:, None])
        bias.append(mass.log() + largest - own)  # −inf where all keys of the cell are among the top keys
    return torch.cat(rows, 1), torch.cat(bias, 1)


def members(query: Tensor, rows: Tensor, bias: Tensor, blocks: Tensor, clusters: Tensor, scale: float) -> Tensor:
    """Attention of each query to the rows of its cluster, `clusters` by block; `blocks` lists queries."""
    N, width = query.shape
    padded = torch.cat([query, query.new_zeros(1, width)])
    met = rows[clusters]
    weights = (scale * padded[blocks] @ met[..., :width].mT + bias[clusters][:, None]).softmax(-1)
    out = query.new_empty(N + 1, rows.shape[2] - width)
    out[blocks.flatten()] = (weights @ met[..., width:]).flatten(0, 1)
    return out[:N]


def products(width: int, clusters: int, topk: int, cells: int, refine: int = 2, bits: int = 63) -> float:
    """Multiply-adds a query and head of "clustered-tail", for as many keys as queries and values as wide as keys.

    Covariance and factor of the logits' space, hashes of queries and of [k, v], rounds of k-means on vectors, logits
    and cells of the mean queries, top keys and cells of the members. Comparisons, exponentials and the k-means on
    hashes, which counts bits, are not in it.
    """
    choose = 2 * width**2 + bits * width + CELL_BITS * 2 * width + refine * clusters * width
    return choose + clusters * 3 * width + (topk + cells) * 2 * width


def exact_products(length: int, width: int) -> float:
    """Multiply-adds a query and head of exact attention."""
    return 2 * length * width


def errors(inputs: list[LayerInputs], grid: list[Setting], every: int = 1) -> dict[Setting, float]:
    """Relative error of attention's output with every setting, mean of inputs; of all heads or every few."""
    sums = dict.fromkeys(grid, 0.0)
    for call in inputs:
        query, key, value = (x[:, ::every] for x in (call.query, call.key, call.value))
        exact = sq.attention(query, key, value, method="full")
        cell = {cells: key_cells(key, value, None, cells=cells, seed=0) for cells in {each.cells for each in grid}}
        for clusters, settings in itertools.groupby(grid, key=lambda each: each.clusters):
            labels = clustered(query, key, clusters)
            for each in settings:
                out = attention(query, key, value, labels, cell[each.cells], Dense(*each), query.shape[3] ** -0.5)
                sums[each] += relative_error(out, exact) / len(inputs)
    return sums


def worth(errors: dict[Setting, float], cost: Callable[[Setting], float]) -> list[Setting]:
    """The settings whose cosines are measured: the Pareto front of cost and error, and k = 64 with X = 16."""
    front: list[Setting] = []
    for each in sorted(errors, key=cost):
        if not front or errors[each] < errors[front[-1]]:
            front.append(each)
    family = [each for each in errors if (each.topk, each.cells) == (64, 16)]
    return [each for each in errors if each in {*front, *family} and ERRORS[0] <= errors[each] <= ERRORS[1]]


@torch.inference_mode()
def measured(data: Path, length: int, known: set[Setting]) -> Iterator[dict]:
    """Cost and error of every setting that is not known, cosine of those that are worth it."""
    whole = [*itertools.product(CLUSTERS, TOPK, CELLS), *MORE.get(length, ())]
    grid = [each for each in itertools.starmap(Setting, LONG.get(length, whole)) if each not in known]
    if not grid:
        return
    read = speeches.passages(data, length, LENGTHS.get(length, 1))
    inputs = read.inputs(LAYERS)[: len(LAYERS)]
    width = inputs[0].query.shape[3]
    exact = [read.model.embed([item]) for item in read.items]

    def cost(each: Setting) -> float:
        return products(width, min(each.clusters, length), each.topk, each.cells)

    found = errors(inputs, grid, EVERY) if length in LONG else errors(inputs, grid)
    more = {Setting(*each) for each in MORE.get(length, ())}
    chosen = grid if length in LONG else {*worth(found, cost), *more}
    for each in grid:
        figures = {"length": length, **each._asdict(), "error": found[each]}
        figures["share"] = cost(each) / exact_products(length, width)
        if each in chosen:
            with running(read.model.model, Dense(*each)):
                near = [
                    float(cosine(read.model.embed([item]), own)) for item, own in zip(read.items, exact, strict=True)
                ]
            figures |= {"passages": len(near), "cosine": statistics.fmean(near), "least": min(near)}
        yield figures


def text_of(row: dict) -> list[str]:
    """Cells of a table: the cost, the setting, what it reaches."""
    setting = f"{row['clusters']}, {row['topk']}, {row['cells']}"
    least = f"{row['least']:.4f}" if row["passages"] > 1 else sheet.MISSING
    return [f"{100 * row['share']:.1f} %", setting, f"{row['error']:.3f}", f"{row['cosine']:.4f}", least]


def cheapest(rows: list[dict]) -> list[list[str]]:
    """For each length and fidelity the measured setting with the fewest multiply-adds."""
    lines = []
    for length, least in itertools.product(sorted({row["length"] for row in rows}), LEAST):
        enough = [row for row in rows if row["length"] == length and row["cosine"] >= least]
        found = text_of(min(enough, key=lambda row: row["share"])) if enough else [sheet.MISSING] * 5
        lines.append([f"{length:,}", str(least), *found])
    return lines


def by_rule(rows: list[dict]) -> list[list[str]]:
    """The settings of each rule at each length, where they were measured."""
    at = {(row["length"], Setting(*(row[name] for name in Setting._fields))): row for row in rows}
    lengths = sorted({row["length"] for row in rows})
    wanted = [(name, length, rule(length)) for name, rule in RULES.items() for length in lengths]
    return [[name, f"{length:,}", *text_of(at[length, s])] for name, length, s in wanted if (length, s) in at]


def publish(rows: list[dict], out: Path | None) -> None:
    """The tables of all settings whose cosine is known."""
    rows = [row for row in rows if "cosine" in row]
    head = ["multiply-adds", "C, k, X", "error", "cosine", "least cosine"]
    parts = [ABOUT, "## Rules", sheet.table(["rule", "tokens", *head], by_rule(rows))]
    parts += [
        "## The cheapest setting for a cosine",
        sheet.table(["tokens", "cosine of at least", *head], cheapest(rows)),
    ]
    for length in sorted({row["length"] for row in rows}):
        own = sorted((row for row in rows if row["length"] == length), key=lambda row: row["share"])
        parts += [f"## {length:,} tokens, {own[0]['passages']} speeches", sheet.table(head, map(text_of, own))]
    sheet.publish("Settings of clustered-tail", parts, out)


def main(
    lengths: tuple[int, ...] = tuple(LENGTHS),
    data: Path = sheet.DATA_OR_LOCAL,
    figures: Path = FIGURES,
    out: Path | None = None,
) -> None:
    rows = [json.loads(line) for line in figures.read_text("utf-8").splitlines()] if figures.is_file() else []
    for length in lengths:
        known = {Setting(*(row[name] for name in Setting._fields)) for row in rows if row["length"] == length}
        for row in measured(data, length, known):
            rows.append(row)
            with figures.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    publish(rows, out)


if __name__ == "__main__":
    sheet.run(main)
