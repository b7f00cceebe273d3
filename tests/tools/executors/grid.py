"""An experiment of 24 cells; the worker of the first one is killed."""

import os
from dataclasses import dataclass
from functools import partial

import torch

import subquad as sq
from subquad.research.papers.base import Cell, Experiment
from subquad.research.papers.results import Results, Table
from tests.tools.executors.jobs import dies


@dataclass(frozen=True, kw_only=True)
class Scale:
    kills: int = 2  # of the worker of the first cell
    clusters: tuple[int, ...] = (2, 4, 8, 16)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)


def error(clusters, seed, context):
    q, k, v = torch.randn(3, 1, 2, 64, 8, generator=torch.Generator().manual_seed(seed))
    exact = sq.attention(q, k, v, method="full")
    out = sq.attention(q, k, v, method=sq.Clustered(clusters=clusters))
    with (context.folder.parent / "ran").open("a") as file:
        file.write(f"{context.folder.name}\n")
    return {"error": float((out - exact).norm() / exact.norm())}


def first(kills, seed, context):
    """A cell whose worker is killed, but not in the process of the test."""
    if "SUBQUAD_TEST_ALONE" not in os.environ:
        marks = context.folder / "kills"
        marks.mkdir(exist_ok=True)
        dies(marks, kills, None)
    return error(32, seed, context)


def mean(keys, context):
    """A cell that needs others: their folders are there."""
    assert all(context.beside(key).is_dir() for key in keys)
    return {"error": float(len(keys))}


def cells(scale):
    grid = [Cell(f"clusters={c} seed={seed}", partial(error, c, seed)) for seed in scale.seeds for c in scale.clusters]
    keys = tuple(cell.key for cell in grid[:3])
    ends = [Cell(f"after {i}", partial(mean, keys), keys) for i in range(2)]
    timed = Cell("timed", partial(error, 4, 9), timed=True)
    return [Cell("first", partial(first, scale.kills, 7)), *grid, *ends, timed]


def results(scale, found):
    rows = [[key, own["error"]] for key, own in found.items()]
    return Results(summary="Errors.", tables=[Table(title="Errors", columns=["", "error"], rows=rows)])


GRID = Experiment(
    name="grid",
    title="24 cells",
    source="nobody",
    deviations=(),
    scales={name: Scale() for name in ("smoke", "small", "paper")},
    cells=cells,
    results=results,
)
