"""A report as one self-contained HTML page."""

import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache, partial
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from subquad.report import content, reading
from subquad.report.content import Table
from subquad.report.schema import Report


def html(report: Report, plots: Mapping[str, bytes]) -> str:
    """The page: recommendation and main table first, then plots, all figures, and what they were measured on.

    `plots` maps the names in `content.FIGURES` to PNGs, as `plots.plots` returns them. They are held in the page, which
    loads nothing from anywhere.
    """
    return template("page.html.j2").render(
        style=style(),
        report=report,
        prose=partial(_prose, [method["method"] for method in report["methods"]]),
        name=content.short_name(report),
        use=content.use(report),
        main=content.main_table(report),
        refused=reading.refused(report),
        pieces=content.pieces,
        remarks=reading.remarks(report),
        legend=content.legend(report),
        noise=reading.noise(report),
        figures=shown(content.FIGURES, plots),
        tables=_tables(report),
        facts=content.facts(report),
    )


@cache
def template(name: str) -> Template:
    """Load a page template of this folder."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((files("subquad.report") / name).read_text("utf-8"))


@cache
def style() -> Markup:
    """The style sheet of all pages."""
    return Markup((files("subquad.report") / "page.css").read_text("utf-8"))


def _prose(names: list[str], text: str) -> list[tuple[str, bool]]:
    """The text in pieces, and whether each is a method with its settings, which is best set as code."""
    longest_first = sorted((re.escape(name) for name in names if ":" in name), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(longest_first)})", text) if longest_first else [text]
    return [(piece, i % 2 == 1) for i, piece in enumerate(pieces) if piece]


def shown(figures: Mapping[str, tuple[str, str]], plots: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The plots that there are, of those with a title and a text, as a page shows them."""
    return [
        {"title": title, "about": about, "data": b64encode(plots[name]).decode(), "width": _width(plots[name])}
        for name, (title, about) in figures.items()
        if name in plots
    ]


def _width(png: bytes) -> int:
    """How wide to show a plot at most, in CSS pixels: its letters are then as high as the page's."""
    return int.from_bytes(png[16:20], "big") * 72 // 100


def _tables(report: Report) -> list[tuple[str, str, Table]]:
    """(title, remark, table) of all that have columns."""
    tables = [
        ("Whole forward passes", "One sequence at a time; time and quartiles.", content.model_table(report)),
        (
            "Error of each layer's attention",
            "‖out − exact‖ / ‖exact‖ on the exact model's own queries, keys and values.",
            content.layer_table(report),
        ),
        ("One attention call", content.OP_REMARK, content.op_table(report)),
        ("Memory of one attention call", "Peak extra MiB, by number of tokens.", content.op_memory_table(report)),
    ]
    return [(title, remark, table) for title, remark, table in tables if table.columns]
