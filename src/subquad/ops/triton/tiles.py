"""Tiles and warps of the kernels that hold whole vectors: the largest that spill nothing on any of the GPUs.

They are chosen by the bytes of a number and the wider of key and value. fp32 takes three products in TF32 each, whose
parts need registers, so that its tiles are smaller. `resources.compile_for` says what a choice takes.
"""

from typing import NamedTuple

import torch

from subquad.ops.triton.launch import padded


class Tiles(NamedTuple):
    """The rows and keys that a program takes at a time, its warps, and how many loads ahead it is."""

    rows: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """What a launch takes."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# kernel -> bytes of a number -> tiles for vectors of up to 64, 128 and 256 components
TABLE = {
    "cells_forward": {
        2: (Tiles(64, 64, 4, 1), Tiles(64, 32, 4, 1), Tiles(32, 32, 8, 1)),
        4: (Tiles(32, 32, 4, 2), Tiles(16, 32, 4, 2), Tiles(16, 16, 8, 1)),
    },
    "cells_to_means": {
        2: (Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2), Tiles(16, 32, 4, 1)),
        4: (Tiles(32, 16, 8, 2), Tiles(16, 16, 8, 2), Tiles(16, 16, 8, 1)),
    },
    "cells_to_keys": {
        2: (Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2), Tiles(16, 16, 4, 1)),
        4: (Tiles(16, 32, 8, 2), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
    },
    "members_of_run": {  # its rows are groups, its keys are tokens
        2: (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 32, 8, 2)),
        4: (Tiles(32, 32, 4, 2), Tiles(16, 32, 4, 2), Tiles(16, 32, 8, 1)),
    },
    "members_forward": {
        2: (Tiles(64, 32, 4, 1), Tiles(64, 32, 4, 2), Tiles(32, 32, 8, 1)),
        4: (Tiles(32, 32, 4, 2), Tiles(16, 16, 4, 2), Tiles(16, 16, 8, 1)),
    },
    "members_to_cells": {
        2: (Tiles(64, 16, 4, 2), Tiles(64, 16, 4, 2), Tiles(32, 16, 8, 1)),
        4: (Tiles(32, 16, 8, 2), Tiles(16, 16, 8, 2), Tiles(16, 16, 8, 1)),
    },
    "members_to_listed": {
        2: (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 16, 8, 1)),
        4: (Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 8, 1)),
    },
    "members_to_queries": {
        2: (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 16, 8, 1)),
        4: (Tiles(32, 32, 4, 2), Tiles(16, 16, 4, 1), Tiles(16, 16, 8, 1)),
    },
}


def tiles_of(kernel: str, dtype: torch.dtype, width: int) -> Tiles:
    """The tiles of a kernel for vectors of this dtype, of at most `width` components."""
    return TABLE[kernel][dtype.itemsize][(64, 128, 256).index(max(64, padded(width)))]
