"""The marks by which a run remembers its data, so that it does not continue on other data."""

from hashlib import blake2b
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np

from subquad.core import checksums as seals
from subquad.core import files
from subquad.core.errors import InputError
from subquad.research.training.checkpoints import has_any, newest_step
from subquad.research.training.tasks.task import Splits

DATA = "data.json"
ITEMS = 64  # of each split that are looked at, evenly spread, the first and the last among them
TOLERANCE = 1e-3  # of means: another machine may round features otherwise

Mark = dict[str, Any]


def check_same_data(splits: Splits, labels: Any, out: Path) -> None:
    """Write down what the data of a new run is; compare it where there are checkpoints.

    Args:
        labels: the classes that the model knows, by their numbers.

    Raises:
        InputError: the run in `out` was started on other data; names the split. Or `out` holds checkpoints that are
            not ours, which would be taken for ones that were cut off, and removed.
    """
    marks = {name: mark_of(part) for name, part in vars(splits).items()}
    marks["labels"] = {str(number): str(label) for number, label in dict(labels or {}).items()}
    path = out / DATA
    if has_any(out) and not newest_step(out) and not path.exists():
        raise InputError(f"{out} contains checkpoints that subquad did not write; give another folder")
    if path.exists() and newest_step(out):
        before = _read(path)
        differs = [name for name in marks if not _alike(before.get(name, {}), marks[name])]
        if differs:
            raise InputError(
                f"the data is not what {out} was started on: {_difference(differs[0], before, marks)}; give the same "
                "data, or another folder with --out"
            )
        return
    files.write(path, seals.sealed_json(marks))


def _read(path: Path) -> dict[str, Mark]:
    """The marks of an earlier run."""
    remedy = "remove this file to continue on the data that is given now"
    marks = seals.parsed(path, remedy)
    if seals.DIGEST in marks:  # without one, damage is not noticed
        marks = seals.opened(marks, path, remedy)
    if not all(isinstance(mark, dict) for mark in marks.values()):
        raise seals.Damaged(path, "its contents differ from what was written", remedy)
    return marks


def mark_of(split: Any) -> Mark:
    """A split's number of items, and checksums that tell it from another one.

    One is of the whole numbers and shapes in some of the items, next to the mean of their other numbers. If the dataset
    defines `contents_to_compare`, the other one is of all data from which the items are made.
    """
    count, checksum, means = len(split), blake2b(digest_size=16), []
    indices = sorted(set(np.linspace(0, count - 1, min(count, ITEMS)).astype(int).tolist()))
    for name, value in (member for index in indices for member in sorted(split[index].items())):
        array = np.asarray(value)
        checksum.update(f"{name}{array.shape}".encode())
        if array.dtype.kind == "f":
            means.append(float(np.abs(array, dtype=np.float64).mean()) if array.size else 0.0)
        else:
            checksum.update(array.astype(np.int64).tobytes())
    mark: Mark = {"items": count, "checksum": checksum.hexdigest(), "mean": float(np.mean(means or [0.0]))}
    if hasattr(split, "contents_to_compare"):
        whole = blake2b(digest_size=16)
        for part in split.contents_to_compare():
            whole.update(f"{len(part)} ".encode())
            whole.update(part)
        mark["contents"] = whole.hexdigest()
    return mark


def _alike(before: Mark, now: Mark) -> bool:
    """Tell whether two marks are equal up to rounding."""
    others = [{name: value for name, value in mark.items() if name != "mean"} for mark in (before, now)]
    return others[0] == others[1] and isclose(before.get("mean", 0.0), now.get("mean", 0.0), rel_tol=TOLERANCE)


def _difference(name: str, before: dict[str, Mark], now: dict[str, Mark]) -> str:
    counts = [mark.get(name, {}).get("items") for mark in (before, now)]
    if counts[0] != counts[1]:
        return f"{counts[1]} items to {'learn from' if name == 'train' else name} instead of {counts[0]}"
    return "other labels" if name == "labels" else f"other items in {name}"
