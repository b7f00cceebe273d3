"""Exact attention of few queries as Markdown, from the plain data of `subquad bench --steps`."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from subquad.tools.report.markup import bullets, fenced, pairs_table, rows_of

KIND = "subquad bench of steps"
HEAD = ("method", "keys", "queries", "ms", "quartiles", "speed-up", "GB/s", "of the read", "relative error")
NONE = "–"


def text(report: Mapping[str, Any]) -> Text:
    """The page, for a terminal."""
    return Text(markdown(report))


def markdown(report: Mapping[str, Any]) -> str:
    """A table for each dtype, and below it why methods were not run, or SDPA ran in their place."""
    s = report["settings"]
    parts = [
        "# Exact attention of few queries over a cache",
        f"Batch {s['batch']}, {s['heads']} query heads on {s['kv_heads']} key heads of width {s['head_dim']}; the "
        "queries are the last tokens of the keys, and the inputs standard normal. `full` is a call of SDPA, and the "
        "kernel is timed as the layers of a swapped model call it, with its arguments prepared. GB/s are the bytes "
        "of keys and values divided by the time. “Of the read” is the time in which the machine reads as many bytes "
        "(`torch.sum` over fp32 numbers, in the same rounds) divided by the call's: 1 is the speed of the memory, or "
        "of the caches if the keys fit into them. The relative error is to attention in fp64 on the same inputs.",
    ]
    for dtype in dict.fromkeys(row["dtype"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["dtype"] == dtype]
        reasons = dict.fromkeys((_name(row), row["reason"] or row["sdpa_instead"]) for row in rows)
        parts += [f"## {dtype}", rows_of([HEAD, *(_line(row) for row in rows if row["reason"] is None)])]
        parts += [pairs_table(shown)] if (shown := [pair for pair in reasons if pair[1]]) else []
        speeds: dict[int, list[float]] = {}  # by the number of keys, in the rounds of each number of queries
        for read in report["reads"]:
            if read["dtype"] == dtype:
                speeds.setdefault(read["keys"], []).append(read["gb_per_s"])
        listed = (f"{min(rates):.1f}–{max(rates):.1f} GB/s at {keys:,} keys" for keys, rates in speeds.items())
        parts.append(f"The read: {', '.join(listed)}, from the slowest to the fastest number of queries.")
    message = report["noise"]["says"]
    parts.append(f"**{message}**" if report["noise"]["busy"] else message)
    parts += [bullets(report["notes"])] if report["notes"] else []
    machine = [*report["hardware"].items(), *report["versions"].items()]
    return "\n\n".join([*parts, "## Machine", pairs_table(machine), "## Command", fenced(report["command"])]) + "\n"


def _name(row: Mapping[str, Any]) -> str:
    return f"`{row['method']}`" + (", by SDPA" if row["sdpa_instead"] else "")


def _line(row: Mapping[str, Any]) -> list[str]:
    return [
        _name(row),
        f"{row['keys']:,}",
        str(row["queries"]),
        f"{row['ms']:.3f}",
        f"{row['ms_low']:.3f}–{row['ms_high']:.3f}",
        NONE if row["speedup"] is None else f"{row['speedup']:.2f}×",
        f"{row['gb_per_s']:.1f}",
        f"{row['of_read']:.2f}",
        f"{row['error']:.1e}",
    ]
