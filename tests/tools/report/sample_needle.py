"""A report as `subquad needle` makes it, with figures that are easy to predict."""

from subquad.tools.needle.schema import NeedleReport
from subquad.tools.runs.records import from_plain, to_plain

LENGTHS, DEPTHS, SAMPLES = [2048, 4096], [0.0, 0.5, 1.0], 2
HALF = 0.05  # of the interval of each difference
TASKS = {"niah_single": -0.2, "fwe": -0.6}  # the log-likelihood of exact attention
EARLIER = {"niah_single": "passkey", "fwe": "frequent"}
# method -> (role, difference to exact at depth 0; half of it at depth 0.5 and none at depth 1; twice at 4,096 tokens)
METHODS = {
    "full": ("exact", 0.0),
    "clustered-tail": ("measured", -0.02),
    "local:window=512+keep": ("measured", -4.0),
    "oracle-top": ("oracle", 0.04),
}


def report() -> NeedleReport:
    return from_plain(NeedleReport, {
        "kind": "subquad needle",
        "schema": 1,
        "created": "2026-03-14T09:26:53+00:00",
        "command": "subquad needle --samples 2",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "hardware": {"processor": "Example CPU @ 2.6 GHz"},
        "settings": {
            "tasks": list(TASKS), "lengths": LENGTHS, "depths": DEPTHS, "samples": SAMPLES, "oracle_length": 2048,
            "seed": 0,
        },
        "model": {"name": "some-org/a-model", "heads": 4, "layers": [{"number": 0}]},
        "text": {"source": "a [text]", "documents": 2, "tokens": 99_999},
        "methods": [method(name, *figures) for name, figures in METHODS.items()],
        "notes": ["oracle-top [was] left out at 4,096 tokens."],
    })  # fmt: skip


def method(name, role, difference):
    settings = {"name": name} | ({"topk": {"2048": 660}} if role == "oracle" else {})
    lengths = LENGTHS[:1] if role == "oracle" else LENGTHS
    cells = [
        cell(task, length, depth, difference)
        for length in lengths
        for task in TASKS
        for depth in ([None] if task == "fwe" else DEPTHS)
    ]
    return {"method": name, "role": role, "settings": settings, "cells": cells}


def cell(task, length, depth, difference):
    at = difference * (1 - (depth or 0.0)) * (length // LENGTHS[0])
    return {
        "task": task,
        "length": length,
        "depth": depth,
        "samples": SAMPLES,
        "log_likelihood": TASKS[task] + at,
        "difference": at,
        "right": 1.0 if at > -1 else 0.5,
        "differences": [at - HALF / 12.7062047, at + HALF / 12.7062047],
        "interval": [at - HALF, at + HALF],
        "right_interval": [0.342, 1.0] if at > -1 else [0.095, 0.905],
    }


def earlier() -> NeedleReport:
    """Returns the report of an earlier version, whose tasks had other names, and whose figures had no intervals."""
    plain = to_plain(report())
    plain["settings"]["tasks"] = [EARLIER[task] for task in TASKS]
    for each in (cell for method in plain["methods"] for cell in method["cells"]):
        each["task"] = EARLIER[each["task"]]
        for name in ("differences", "interval", "right_interval"):
            del each[name]
    return from_plain(NeedleReport, plain)
