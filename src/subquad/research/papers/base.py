"""The definition of an experiment: cells that are run one by one and kept, and what is made of them.

The papers' tasks are registered here: a worker that runs a cell imports the experiment's file, which imports this one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from subquad.core import files
from subquad.research.papers import tasks as _registered  # noqa: F401
from subquad.research.papers.results import Results
from subquad.tools.runs.cache import SHARED
from subquad.tools.runs.jobs import Job, Progress

SCALES = ("smoke", "small", "paper")

# The remedy if a file that one cell left for others is damaged.
AGAIN = "remove its folder and the .json file next to that, and the same command runs its cell again"

JobResults = Mapping[str, dict[str, Any]]  # the result of each cell, by its key


@dataclass(frozen=True)
class Context:
    """The environment in which a cell runs."""

    folder: Path  # its own: what it leaves there is there when it is resumed, and for later cells (`beside`)
    data: Path | None  # the folder of real data
    device: str
    progress: Progress
    after: tuple[str, ...] = ()  # keys of the cells that ran before for certain

    def beside(self, key: str) -> Path:
        """The folder of another cell, that ran before."""
        assert key in self.after, f"the cell in {self.folder} reads {key!r}, but does not run after it: {self.after}"
        return self.folder.parent / slug(key)

    def shared(self, name: str, make: Callable[[Path], object]) -> Path:
        """A folder of all cells, which the first one that comes makes; others wait meanwhile."""
        folder = self.folder.parent / slug(name)
        done = folder / SHARED
        if not done.exists():
            files.make_folder(folder)
            with FileLock(folder / ".lock"):
                if not done.exists():
                    make(folder)
                    files.write(done, "")
        return folder


# A cell is a job that is called with a `Context` and whose result is plain data (JSON). Its `after` are the keys of the
# cells whose folders it reads; they come before it.
Cell = Job[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure of a paper.

    `scales` has the settings, a frozen dataclass of plain values, for "smoke" (under 15 seconds, synthetic or little
    data: only to see that it runs), "small" (two cores, an hour a cell group) and "paper" (the paper's own).
    """

    name: str
    title: str
    source: str
    deviations: Sequence[str]  # from the paper, and why
    scales: Mapping[str, Any]
    cells: Callable[[Any], Sequence[Cell]]
    results: Callable[[Any, JobResults], Results]
    # Folders of real data, at any scale but "smoke"; or a function that returns them from the settings.
    needs: Sequence[str] | Callable[[Any], Sequence[str]] = ()
    smoke_needs: Sequence[str] = ()


def slug(key: str) -> str:
    """A cell's key as the name of a file."""
    return "".join(c if c.isalnum() or c in "-.=_" else "_" for c in key)


def note_on_seeds(seeds: Sequence[int]) -> str:
    """The end of a note on runs that differ in the seed of the training alone; empty for one seed."""
    if len(seeds) < 2:
        return ""
    return " All seeds share what a method draws (hash planes, random features, the start of its own parameters)."


def spread(values: Sequence[float], digits: int = 3, *, percent: bool = False) -> str:
    """ "0.993 ± 0.002 (3)": mean, standard deviation and number of runs; without the latter two for one run."""
    values = [100 * v for v in values] if percent else list(values)
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f} ({len(values)})"
