"""Whatever was not measured is absent, None or not finite; nothing may crash on it, and no such figure may be shown."""

import copy
from io import StringIO
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from subquad.tools.compare import plots
from subquad.tools.compare.page import html
from subquad.tools.compare.printed import markdown, rich_table
from subquad.tools.report import drawing
from subquad.tools.report.report_files import as_json
from tests.tools.report import sample

OPTIONAL = ("layers", "fidelity", "quality", "model", "op", "crossover", "task", "reason")
LOST = st.sampled_from(["absent", None, float("nan"), float("inf")])


@st.composite
def damaged(draw) -> Any:
    report: Any = copy.deepcopy(draw(st.sampled_from([sample.encoder, sample.causal]))())
    report["methods"] = report["methods"][: draw(st.integers(0, len(report["methods"])))]
    for method in report["methods"]:
        for key in draw(st.sets(st.sampled_from(OPTIONAL), max_size=3)):
            method.pop(key, None)
        for part in ("fidelity", "quality", "model", "op"):
            for length, figures in list(method.get(part, {}).items()):
                if draw(st.integers(0, 5)) == 0:
                    del method[part][length]
                elif isinstance(figures, dict):
                    _damage(draw, figures)
                elif draw(st.booleans()):
                    method[part][length] = draw(LOST.filter(lambda lost: lost != "absent"))
    for part in ("settings", "model", "text", "hardware", "versions"):
        for key in draw(st.sets(st.sampled_from(sorted(report[part])), max_size=3)):
            del report[part][key]
    if draw(st.booleans()):
        report.pop("task", None)
    return report


def _damage(draw, figures):
    for key in draw(st.sets(st.sampled_from(sorted(figures)), max_size=2)) if figures else ():
        lost = draw(LOST)
        if lost == "absent" or isinstance(figures[key], int | str):
            del figures[key]
        elif not (isinstance(figures[key], dict) and lost is not None):
            figures[key] = lost


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(damaged(), st.sampled_from([60, 80, 120, 200]))
def test_text_never_crashes(report, width):
    out = StringIO()
    Console(file=out, width=width).print(rich_table(sample.record(report)))
    for text in (out.getvalue(), markdown(sample.record(report)), html(sample.record(report), {})):
        assert "nan" not in text.split()
        assert "None" not in text.replace("None.", "")
    assert b"NaN" not in as_json(report)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(damaged())
def test_figures_never_crash(report):
    with drawing.look():
        for draw in plots._makers().values():
            for narrow in (False, True):
                draw(sample.record(report), narrow)  # laid out, not rendered: that is most of the time


@pytest.mark.parametrize("part", OPTIONAL)
def test_rendered_without_a_part(part):
    report = sample.causal()
    for method in report["methods"]:
        method.pop(part, None)  # type: ignore[misc]
    for png in plots.plots(sample.record(report)).values():
        assert png.startswith(b"\x89PNG")
