"""Write a report's files."""

import json
import math
import os
from pathlib import Path
from typing import Any

from subquad.report import content
from subquad.report.page import html
from subquad.report.plots import plots
from subquad.report.schema import Report
from subquad.report.tables import markdown


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write report.json, report.md, report.html and the plots into a folder, made if need be; return their paths.

    All of them are made before the first one is written, and each replaces an earlier file of its name in one step.
    Plots of an earlier report that this one has no figures for are removed.
    """
    contents = _contents(report)
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: folder / f".{name}.part" for name in contents}
    try:
        for name, data in contents.items():
            parts[name].write_bytes(data)
        for name, part in parts.items():
            os.replace(part, folder / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    for name in content.FIGURES.keys() - contents.keys():
        (folder / name).unlink(missing_ok=True)
    return [folder / name for name in contents]


def _contents(report: Report) -> dict[str, bytes]:
    drawn = plots(report)
    return {
        "report.json": json.dumps(_finite(report), indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n",
        "report.md": markdown(report, list(drawn)).encode(),
        **drawn,
        "report.html": html(report, drawn).encode(),
    }


def _finite(value: Any) -> Any:
    """The same data with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
