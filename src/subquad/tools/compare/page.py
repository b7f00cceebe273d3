"""A comparison as one self-contained HTML page."""

import re
from collections.abc import Mapping
from functools import partial

from subquad.tools.compare import reading, tables
from subquad.tools.compare.schema import Report
from subquad.tools.report import layout, terms
from subquad.tools.report.content import ReportTable
from subquad.tools.report.vector import Drawing


def html(report: Report, drawn: Mapping[str, Drawing]) -> str:
    """The page: recommendation and main table first, then plots, all figures, and what they were measured on.

    `drawn` maps the names in `tables.PLOTS` to SVGs, as `plots.drawings` returns them.
    """
    names = [method.method for method in report.methods]
    main, others = tables.main_table(report), _tables(report)
    return layout.page(
        "compare/page.html.j2",
        drawn,
        report=report,
        prose=partial(_prose, names),
        name=tables.short_name(report),
        use=tables.use(report),
        next=tables.NEXT,
        main=main,
        judged=_judged(report),
        kept_where=_kept_where(report),
        refused=reading.refused(report),
        remarks=reading.notes(report),
        legend=tables.legend(report),
        figures=layout.shown(tables.PLOTS, drawn),
        tables=others,
        facts=tables.summary_sections(report),
        glossary=terms.glossary(_words(report, [main, *(table for _, _, table in others)])),
        methods=terms.described(names),
    )


def _words(report: Report, tables: list[ReportTable]) -> set[str]:
    """The words that the glossary may have to explain."""
    markers = {"refused": "refused", "adapter": "@", "plan": "plan:"}
    names = " ".join([method.method for method in report.methods] + [m.status for m in report.methods])
    words = {word for word, mark in markers.items() if mark in names}
    if report.recommendation.next:
        words.add("plan")
    return words | layout.heads(tables) | set(terms.COMPARED)


def _kept_where(report: Report) -> str:
    """The condition that the rows in `_judged` meet, in words; empty where no minimum is known."""
    least, length = reading.min_fidelity(report), reading.model_length(report)
    return f"fidelity ≥ {least:g} at {tables.tokens(length)} tokens" if least is not None and length else ""


def _judged(report: Report) -> list[str]:
    """The names of the rows at or above the minimum fidelity, at the main length."""
    least, length = reading.min_fidelity(report), reading.model_length(report)
    return [
        method.method
        for method in reading.ran(report)
        if least is not None and (fidelity := reading.fidelity(method, length)) is not None and fidelity >= least
    ]


def _prose(names: list[str], text: str) -> list[tuple[str, bool]]:
    """The text in pieces, and whether each is a method with its settings, which is best set as code."""
    longest_first = sorted((re.escape(name) for name in names if ":" in name), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(longest_first)})", text) if longest_first else [text]
    return [(piece, i % 2 == 1) for i, piece in enumerate(pieces) if piece]


def _of_batch(report: Report) -> str:
    size = report.settings.get("batch", 1)
    return "One sequence at a time" if size == 1 else f"{size} sequences at a time"


def _tables(report: Report) -> list[tuple[str, str, ReportTable]]:
    """(title, remark, table) of all that have columns."""
    every = [
        (tables.REQUESTS, tables.requests_caption(report), tables.request_table(report)),
        ("Whole forward passes", f"{_of_batch(report)}; time and quartiles.", tables.model_table(report)),
        (
            "Error of each layer's attention",
            "‖out − exact‖ / ‖exact‖ on the exact model's own queries, keys and values.",
            tables.layer_table(report),
        ),
        ("One attention call", tables.OP_NOTE, tables.op_table(report)),
        ("Memory of one attention call", "Peak extra MiB, by number of tokens.", tables.op_memory_table(report)),
    ]
    return [(title, caption, table) for title, caption, table in every if table.columns]
