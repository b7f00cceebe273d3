"""Read the `bench.json` of an earlier run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subquad.core.errors import InputError
from subquad.core.reading import is_folder, read_json
from subquad.tools.bench.schema import KIND, SCHEMA, BenchReport
from subquad.tools.bench.settings import BenchSettings
from subquad.tools.runs.records import from_plain

IDENTITY = {"method": str, "dtype": str, "passes": str, "length": int, "status": str}
METRICS = ("ms", "ms_low", "ms_high", "speedup", "speedup_low", "speedup_high", "extra_bytes")
PARTS = {"created": str, "hardware": dict, "versions": dict, "settings": dict, "backend": str, "cells": list}


def read_earlier(path: Path, settings: BenchSettings) -> BenchReport:
    """The report of an earlier run, from its file or its folder, to be compared with a run of these settings.

    Raises:
        InputError: there is no such file, it is something else, or its inputs had another shape or kind of device.
    """
    path = path / "bench.json" if is_folder(path) else path
    report = read_json(path)
    if not isinstance(report, dict) or report.get("kind") != KIND:
        raise InputError(f"{path} is not from `subquad bench`; --compare accepts the bench.json of an earlier run")
    if report.get("schema") != SCHEMA:
        raise InputError(f"{path} has schema {report.get('schema')!r} but this version reads {SCHEMA}; measure again")
    for part, kind in PARTS.items():
        if not isinstance(report.get(part), kind):
            raise InputError(f"{path} is damaged: its {part!r} is not of type {kind.__name__}")
    for number, cell in enumerate(report["cells"]):
        _check(path, number, cell)
    _check_alike(path, report["settings"], settings)
    try:
        return from_plain(BenchReport, report)
    except (AttributeError, TypeError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _check_alike(path: Path, then: Mapping[str, Any], now: BenchSettings) -> None:
    """InputError where the calls are not the same ones: no ratio of theirs would mean anything."""
    for name in ("batch", "heads", "head_dim"):
        if then.get(name) != getattr(now, name):
            option = name.replace("_", "-")
            raise InputError(f"{path} has {option} {then.get(name)} but this run {getattr(now, name)}; they must match")
    then_causal, causal = ("causal" if each else "not causal" for each in (then.get("causal", False), now.causal))
    if then_causal != causal:
        raise InputError(f"{path} was measured {then_causal} but this run is {causal}; they must match")
    device, kind = str(then.get("device")), now.device.partition(":")[0]
    if device.partition(":")[0] != kind:
        raise InputError(f"{path} was measured on {device} but this run is on {kind}; they must match")


def _check(path: Path, number: int, cell: Any) -> None:
    for name, kind in IDENTITY.items():
        if not isinstance(cell, dict) or not isinstance(cell.get(name), kind):
            raise InputError(f"{path} is damaged: {name!r} of cell {number} is not of type {kind.__name__}")
    for name in METRICS:
        if not isinstance(cell.get(name), int | float | None):
            raise InputError(f"{path} is damaged: {name!r} of cell {number} is not a number")
    if cell["status"] == "measured" and not all(cell.get(name) for name in METRICS[:3]):
        raise InputError(f"{path} is damaged: cell {number} is measured, but has no times")
    if cell.get("speedup") and not all(cell.get(name) for name in METRICS[4:6]):
        raise InputError(f"{path} is damaged: cell {number} has a speed-up without its quartiles")
