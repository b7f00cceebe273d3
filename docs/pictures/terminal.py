"""The output of `subquad compare` as a picture: its own renderer, fed with the report in benchmarks/results."""

import io
import json
from html import escape
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from pictures.svg import MONO
from subquad.tools.compare.printed import rich_table
from subquad.tools.compare.schema import Report
from subquad.tools.runs.records import from_plain

REPORT = Path(__file__).parents[2] / "benchmarks" / "results" / "compare-default.json"
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


def report() -> Report:
    """The report, as far as the terminal shows it."""
    record: Report = from_plain(Report, json.loads(REPORT.read_text("utf-8")))
    return record


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
    console.print(f"[green]$[/green] {report().command}", highlight=False)
    console.print(rich_table(report()))
    about = "The table of fidelity, speed-up and memory of each method at two lengths, and below it the recommendation."
    form = FORMAT.replace("ABOUT", escape(about)).replace("FONTS", MONO)
    svg = console.export_svg(theme=DARK, code_format=form, unique_id="terminal")
    return "\n".join(line.strip() for line in svg.splitlines() if line.strip()) + "\n"


# path below docs/assets/pictures -> what draws it
FILES = {"terminal.svg": terminal}
