"""Tiles and warps of the kernels that hold whole vectors: the largest that spill nothing on any of the GPUs.

They are chosen by the bytes of a number and the wider of key and value. fp32 takes three products in TF32 each, whose
parts need registers, so that its tiles are smaller, and inner products take rows in slices (`launch.inner`).
`resources.compile_for` reports the resources of a choice.

If tiles were measured on a GPU, `MEASURED` has those of its architecture, which override the table of all.
`subquad bench --device cuda --gpu-sheet` prints the entries to put there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from subquad.core.environment import gpu_architecture
from subquad.kernels.triton.launch import padded

FIXED = 0  # rows that a kernel cannot choose


class Tiles(NamedTuple):
    """The rows and keys that a program takes at a time, its warps, and how many loads ahead it is."""

    rows: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """The options of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def _alike(tiles: Tiles) -> tuple[Tiles, Tiles, Tiles]:
    return tiles, tiles, tiles


# kernel -> bytes of a number -> tiles for vectors of up to 64, 128 and 256 components
TABLE = {
    "cells_forward": {
        2: (Tiles(64, 64, 4, 1), Tiles(64, 32, 4, 1), Tiles(32, 32, 8, 1)),
        4: (Tiles(32, 32, 4, 2), Tiles(32, 16, 8, 1), Tiles(16, 16, 8, 1)),
    },
    "cells_to_means": {
        2: (Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2), Tiles(16, 32, 4, 1)),
        4: (Tiles(32, 16, 4, 1), Tiles(32, 16, 4, 1), Tiles(16, 16, 8, 1)),
    },
    "cells_to_keys": {
        2: (Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(16, 16, 4, 1)),
        4: (Tiles(16, 32, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 8, 1)),
    },
    "members_of_run": {  # its rows are groups, its keys are tokens
        2: (Tiles(64, 32, 4, 2), Tiles(64, 16, 4, 2), Tiles(32, 32, 8, 2)),
        4: (Tiles(32, 32, 4, 2), Tiles(16, 32, 4, 2), Tiles(16, 32, 8, 1)),
    },
    "members_forward": {
        2: (Tiles(64, 32, 4, 1), Tiles(64, 32, 4, 2), Tiles(32, 32, 8, 1)),
        4: (Tiles(32, 32, 4, 2), Tiles(16, 16, 4, 2), Tiles(16, 16, 8, 1)),
    },
    "members_sums": {
        2: (Tiles(64, 32, 4, 1), Tiles(64, 32, 4, 2), Tiles(32, 32, 8, 1)),
        4: (Tiles(32, 32, 4, 2), Tiles(16, 32, 4, 1), Tiles(16, 16, 8, 1)),
    },
    "members_to_cells": {
        2: (Tiles(64, 16, 4, 2), Tiles(32, 16, 4, 2), Tiles(32, 16, 8, 1)),
        4: (Tiles(32, 16, 4, 1), Tiles(32, 16, 4, 1), Tiles(16, 16, 8, 1)),
    },
    "members_to_listed": {
        2: (Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1), Tiles(32, 16, 8, 1)),
        4: (Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 8, 1)),
    },
    "members_to_queries": {
        2: (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 16, 8, 1)),
        4: (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(16, 16, 8, 1)),
    },
    # Of pairs: lists of queries and of keys, which may be shorter.
    "attend_tile": {
        2: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2)),
        4: (Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 8, 1)),
    },
    "gradient_of_queries": {
        2: (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 2)),
        4: (Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(16, 16, 8, 1)),
    },
    "gradient_of_keys": {
        2: (Tiles(32, 64, 4, 2), Tiles(32, 32, 4, 1), Tiles(32, 16, 4, 2)),
        4: (Tiles(16, 32, 4, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
    },
    # Of features: the rows are tokens, the keys are features. Chunks have the tokens that the whole pass divides by.
    "sum_chunks": {2: _alike(Tiles(64, 32, 4, 2)), 4: _alike(Tiles(32, 32, 4, 2))},
    "read_states": {2: _alike(Tiles(64, 32, 8, 2)), 4: _alike(Tiles(32, 32, 8, 2))},
    "query_slopes": {
        2: (Tiles(64, 32, 4, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
        4: (Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
    },
    "key_slopes": {
        2: (Tiles(64, 32, 4, 2), Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
        4: (Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 2), Tiles(32, 32, 8, 2)),
    },
    "read_chunks": {2: _alike(Tiles(FIXED, 16, 8, 2)), 4: _alike(Tiles(FIXED, 16, 4, 2))},
    "chunk_slopes": {2: _alike(Tiles(FIXED, 16, 8, 2)), 4: _alike(Tiles(FIXED, 16, 4, 2))},
    "chunk_values": {2: _alike(Tiles(FIXED, 16, 8, 2)), 4: _alike(Tiles(FIXED, 16, 4, 2))},
}


WIDTHS = 64, 128, 256
Entry = tuple[str, int, int]  # kernel, bytes of a number, one of the widths

# architecture, as `gpu_architecture` names it -> entries -> tiles
MEASURED: dict[str, dict[Entry, Tiles]] = {
    "sm_90": {  # an H200, 16,384 tokens and 32 heads in bf16 (`benchmarks/results/gpu-h200.md`)
        ("members_of_run", 2, 64): Tiles(64, 32, 2, 2),
        ("members_forward", 2, 64): Tiles(64, 32, 4, 2),
        ("cells_forward", 2, 64): Tiles(64, 64, 4, 1),
        ("attend_tile", 2, 64): Tiles(64, 64, 4, 1),
        ("members_of_run", 2, 128): Tiles(64, 32, 4, 2),
        ("members_forward", 2, 128): Tiles(64, 32, 4, 1),
        ("cells_forward", 2, 128): Tiles(64, 32, 4, 1),
    }
}

_overrides: list[tuple[Entry, Tiles]] = []  # of all threads: autograd runs a GPU's backward pass in one of its own


def entry(kernel: str, dtype: torch.dtype, width: int) -> Entry:
    """The key of the tiles of a kernel for vectors of this dtype, of at most `width` components."""
    return kernel, dtype.itemsize, max(64, padded(width))


def tiles_of(kernel: str, dtype: torch.dtype, width: int) -> Tiles:
    """The tiles of a kernel: those of the open `overridden`, else those measured on the GPU here, else the table's."""
    at = entry(kernel, dtype, width)
    if _overrides and _overrides[-1][0] == at:
        return _overrides[-1][1]
    return MEASURED.get(gpu_architecture(), {}).get(at) or _of_table(at)


def _of_table(at: Entry) -> Tiles:
    kernel, size, width = at
    return TABLE[kernel][size][WIDTHS.index(width)]


@contextmanager
def overridden(kernel: str, dtype: torch.dtype, width: int, tiles: Tiles) -> Iterator[None]:
    """Give a kernel other tiles inside the block, in all threads."""
    _overrides.append((entry(kernel, dtype, width), tiles))
    try:
        yield
    finally:
        _overrides.pop()


def candidates(kernel: str, dtype: torch.dtype, width: int) -> list[Tiles]:
    """Tiles that are worth measuring: those in use, which are first, and those that differ from them in one thing.

    That is half or twice the rows (where a kernel can choose them) or the keys, half or twice the warps, one stage more
    or less. Some of them spill, or take more shared memory than a GPU has.
    """
    tiles = tiles_of(kernel, dtype, width)
    changes = {
        "rows": (tiles.rows // 2, tiles.rows * 2),
        "keys": (tiles.keys // 2, tiles.keys * 2),
        "warps": (tiles.warps // 2, tiles.warps * 2),
        "stages": (tiles.stages - 1, tiles.stages + 1),
    }
    least, most = Tiles(16, 16, 2, 1), Tiles(128, 128, 8, 4)
    others = [
        tiles._replace(**{name: value})
        for name, values in changes.items()
        for value in values
        if getattr(least, name) <= value <= getattr(most, name)
    ]
    return [tiles, *others]
