"""Write the files of a report."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from subquad.core.files import write_all
from subquad.tools.runs.records import to_plain


def write_files(contents: Mapping[str, bytes], folder: Path, stale: Iterable[str] = ()) -> list[Path]:
    """Write files into a folder, made if need be; return their paths.

    Each replaces an earlier file of its name in one step, after all of them are on the disk. Files of an earlier report
    that this one does not have, `stale`, are removed.

    Raises:
        CannotWrite: the disk is full, for example; the earlier report is still there.
    """
    paths = write_all(contents, folder)
    for name in set(stale) - contents.keys():
        (folder / name).unlink(missing_ok=True)
    return paths


def as_json(data: Any) -> bytes:
    """JSON of a record or of plain data, with null for NaN and infinity, which it does not have."""
    return json.dumps(finite(to_plain(data)), indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def finite(value: Any) -> Any:
    """Returns plain data with None in the place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
