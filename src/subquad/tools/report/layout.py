"""Shared code of the pages: templates, style sheet, script and figures. A page is one file that requests nothing."""

from base64 import b64encode
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from subquad.tools.report import terms, vector
from subquad.tools.report.content import ReportTable
from subquad.tools.report.vector import Drawing


def page(template: str, drawn: Mapping[str, Drawing], **content: Any) -> str:
    """Fill a template, `folder/name`. The page may run our own script and nothing else, and load nothing."""
    script = _text("report/page.js")
    digest = b64encode(sha256(script.encode()).digest()).decode()
    style = _text("report/page.css") + vector.palette(drawn.values())
    return _environment().get_template(template).render(script=script, digest=digest, style=style, **content)


def shown(captions: Mapping[str, tuple[str, str]], drawn: Mapping[str, Drawing]) -> list[dict[str, Any]]:
    """The plots that there are, of those with a title and a text, as a page shows them."""
    return [
        {"title": title, "about": about, "drawing": drawn[name]}
        for name, (title, about) in captions.items()
        if name in drawn
    ]


def heads(tables: Iterable[ReportTable]) -> set[str]:
    """The terms of the heads, and the marks, in some tables, which a glossary may explain."""
    return {
        word
        for table in tables
        for word in (table.first, *(c.term for c in table.columns), *(m for line in table.lines for m in line.marks))
    }


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(_text), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {
        "anchor": terms.anchor,
        "family": terms.family_of,
        "describe": terms.description,
        "term_of": terms.term_of,
        "terms": terms.TERMS,
    }
    return environment


@cache
def _text(name: str) -> Markup:
    """A file in a folder of `subquad.tools`."""
    return Markup((files("subquad.tools") / name).read_text("utf-8"))
