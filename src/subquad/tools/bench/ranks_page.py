"""Methods on several ranks as Markdown, from the plain data of `subquad bench` under torchrun."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from subquad.tools.report.markup import bullets, fenced, pairs_table, rows_of

KIND = "subquad bench on ranks"
HEAD = ("method", "mode", "tokens", "ms", "quartiles", "MiB sent per rank", "exchanges", "relative error")
NONE = "–"


def text(report: Mapping[str, Any]) -> Text:
    """The page, for a terminal."""
    return Text(markdown(report))


def markdown(report: Mapping[str, Any]) -> str:
    """A table for each dtype and pass, and below it why methods were not run."""
    parts = [
        f"# Attention on {report['ranks']} ranks",
        "The tokens of each input are split over the ranks. A time is the median over rounds of the slowest rank's. "
        "In mode `summary`, ranks send a summary of their keys; in mode `heads`, all tokens to the rank that runs a "
        "head. The relative error is that of the output to exact attention's, on standard normal inputs. `full` is "
        "exact attention on the same ranks.",
    ]
    for dtype, passes in dict.fromkeys((row["dtype"], row["passes"]) for row in report["rows"]):
        chosen = [row for row in report["rows"] if (row["dtype"], row["passes"]) == (dtype, passes)]
        parts += [f"## {passes}, {dtype}", rows_of([HEAD, *(_line(row) for row in chosen if row["reason"] is None)])]
        reasons = dict.fromkeys((f"`{row['method']}`, {row['mode']}", row["reason"]) for row in chosen if row["reason"])
        parts += [pairs_table(list(reasons))] if reasons else []
    machine = [*report["hardware"].items(), *report["versions"].items()]
    parts += [bullets(report["notes"])] if report["notes"] else []
    return "\n\n".join([*parts, "## Machine", pairs_table(machine), "## Command", fenced(report["command"])]) + "\n"


def _line(row: Mapping[str, Any]) -> list[str]:
    return [
        f"`{row['method']}`",
        row["mode"],
        f"{row['length']:,}",
        f"{row['ms']:.2f}",
        f"{row['ms_low']:.2f}–{row['ms_high']:.2f}",
        f"{row['bytes'] / 2**20:.3f}",
        str(row["exchanges"]),
        NONE if row["error"] is None else f"{row['error']:.2e}",
    ]
