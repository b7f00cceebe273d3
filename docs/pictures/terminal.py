"""The output of `subquad compare` as a picture: its own renderer, fed with the report in benchmarks/results.

The repository has the report as Markdown, so its figures are read from there into the shape of `report.json`.
"""

import io
import math
import re
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from pictures.svg import MONO
from subquad.methods import parse_method
from subquad.tools.compare.attachment import attachment
from subquad.tools.compare.code import code_of
from subquad.tools.compare.schema import MethodReport, Report
from subquad.tools.compare.tables import rich_table
from subquad.tools.models import demo
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.records import from_plain

REPORT = Path(__file__).parents[2] / "benchmarks" / "results" / "compare-default.md"
COLUMNS = 120
ANSI = ("484f58", "ff7b72", "7ee787", "f2cc60", "79c0ff", "d2a8ff", "76d9e6", "d6dde5")
DARK = TerminalTheme((13, 17, 23), (214, 221, 229), [tuple(bytes.fromhex(color)) for color in ANSI])  # type: ignore[misc]
# As rich's own, without links to fonts and without a window's buttons.
FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>What subquad compare prints</title>
<desc>ABOUT</desc>
<style>
.{unique_id}-matrix {{ font-family: FONTS; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
<rect width="100%" height="100%" rx="8" fill="#0d1117"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
FIGURES = {  # columns of "Whole forward passes" and where report.json has them
    "perplexity": ("quality", "perplexity"),
    "KL": ("quality", "kl"),
    "same top token": ("quality", "agreement"),
    "KL, last quarter": ("quality", "kl_last_quarter"),
    "same top token, last quarter": ("quality", "agreement_last_quarter"),
    "ms": ("model", "ms"),
    "speed-up": ("model", "speedup"),
    "over fp32": ("model", "speedup_fp32"),
    "extra MiB": ("model", "extra_mib"),
}


def section(text: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    return re.split(r"\n## ", text.partition(f"\n## {title}\n")[2])[0]


def table(text: str) -> list[dict[str, str]]:
    """The first table of a section, a mapping from heads to cells for each row."""
    lines = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines() if line[:1] == "|"
    ]
    return [dict(zip(lines[0], row, strict=True)) for row in lines[2:]]


def pairs(text: str, title: str) -> dict[str, str]:
    """A section of `- name: value`."""
    return dict(re.findall(r"^- ([^:\n]+): (.+)$", section(text, title), re.MULTILINE))


def figure(cell: str) -> float | None:
    """The number in a cell; None where it was not measured."""
    digits = re.sub(r"[≈↓×,]", "", cell)
    return float(digits) if re.fullmatch(r"-?[\d.]+", digits) else None


def verdict(cell: str) -> str:
    """The report's verdict on a speed-up."""
    return "within the noise" if cell.startswith("≈") else "slower" if cell.startswith("↓") else "faster"


def method_of(row: dict[str, str]) -> dict[str, Any]:
    """A row of the report, with its figures at each length."""
    name, _, mark = row["method"].partition(" (")
    plain, _, dtype = name.partition(" in ")
    method: dict[str, Any] = {
        "method": name,
        "settings": parse_method(plain).to_dict(),
        "status": "exact" if mark == "baseline)" else "measured",
        "dtype": dtype or "fp32",
        "fidelity": {},
        "quality": {},
        "model": {},
    }
    for head, cell in row.items():
        length, _, column = head.replace(",", "", 1).partition(" tokens: ")
        value = figure(cell)
        if column == "fidelity" and value is not None:
            method["fidelity"][length] = value
        elif column in FIGURES and value is not None:
            part, key = FIGURES[column]
            entry = method[part].setdefault(length, {})
            entry[key] = value
            if key.startswith("speedup"):
                entry[key.replace("speedup", "verdict")] = verdict(cell)
    return method


def report() -> Report:
    """The report, as far as the terminal shows it."""
    text = REPORT.read_text("utf-8")
    rows = table(section(text, "Whole forward passes"))
    settings, reasons = pairs(text, "Settings"), re.findall(r"^- (.+)$", text.partition("\n## ")[0], re.MULTILINE)
    recommended = {
        length.replace(",", ""): row["method"].partition(" (")[0]
        for row in rows
        for length in re.findall(r"([\d,]+)", row["method"].partition("recommended at ")[2])
    }
    longest = settings["max length"].replace(",", "")
    eager = re.search(r"With eager attention: ([\d,]+) ms and ([\d.,]+) extra MiB at ([\d,]+)", text)
    sequences = re.findall(r"(\d+) (\d+)", settings["sequences"])
    command = re.findall(r"```sh\n(.+?)\n```", text)
    methods, model = [method_of(row) for row in rows], pairs(text, "Model")
    floor = Floor("kl", -math.log(float(settings["min fidelity"])))
    shown = {**model, "layers": list(range(int(model["layers"]))), "position_limit": None}
    for method in methods:
        method["layers"] = shown["layers"]
    records = from_plain(list[MethodReport], methods)
    attached = attachment(records, [int(n) for n in recommended], floor, 10**6, {}, None)
    assert attached is not None
    eager_cost = {"ms": figure(eager[1]), "speedup": None, "extra_mib": figure(eager[2])} if eager else {}
    plain: dict[str, Any] = {
        "created": "",
        "command": "",
        "versions": {},
        "hardware": {},
        "text": {},
        "settings": {
            "max_length": int(longest),
            "min_fidelity": float(settings["min fidelity"]),
            "floor": {"figure": re.search(r"figure (\w+)", settings["floor"])[1]},  # type: ignore[index]
            "sequences": dict(sequences),
        },
        "model": {**model, "layers": int(model["layers"])},
        "methods": methods,
        "eager": {eager[3].replace(",", ""): eager_cost} if eager else {},
        "noise": {
            "load": {"others": None, "average": None, "cores": 1},
            "busy": False,
            "says": re.search(r"^Noise: .+$", text, re.MULTILINE)[0],  # type: ignore[index]
            "model": {},
            "op": {},
        },
        "recommendation": {
            "choice": recommended.get(longest, "full"),
            "by_length": recommended,
            "headline": re.search(r"^\*\*(.+)\*\*$", text, re.MULTILINE)[1],  # type: ignore[index]
            "reasons": reasons,
            "code": code_of(attached, records, shown, demo.DECODER),
            "next": command[0],
        },
        "cautions": re.findall(r"^- (Left out for lack of time.+)$", section(text, "Notes"), re.MULTILINE),
        "notes": [],
    }
    read: Report = from_plain(Report, plain)
    return read


def terminal() -> str:
    """The picture."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    console.print(
        f"[green]$[/green] {section(REPORT.read_text('utf-8'), 'Command').split(chr(10))[2]}", highlight=False
    )
    console.print(rich_table(report()))
    about = "The table of fidelity, speed-up and memory of each method at two lengths, and below it the recommendation."
    form = FORMAT.replace("ABOUT", escape(about)).replace("FONTS", MONO)
    svg = console.export_svg(theme=DARK, code_format=form, unique_id="terminal")
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


# path below docs/assets/pictures -> what draws it
FILES = {"terminal.svg": terminal}
