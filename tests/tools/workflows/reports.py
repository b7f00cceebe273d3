"""Reports of comparisons as `report.json` has them."""

from typing import Any

from subquad.tools.compare import judgement, report
from subquad.tools.compare.schema import Report
from subquad.tools.runs.records import from_plain, to_plain


def report_of(comparison, plan=None) -> dict[str, Any]:
    """The report of a comparison as plain data, which its record is read from again."""
    made = report.report_of(comparison, plan)
    assert to_plain(from_plain(Report, to_plain(made))) == to_plain(made)
    plain: dict[str, Any] = to_plain(made)
    return plain


def read_anew(plain, settings, plan=None) -> dict[str, Any]:
    """A finished report, plain data, as these settings read it."""
    anew: dict[str, Any] = to_plain(judgement.read_anew(from_plain(Report, plain), settings, plan))
    return anew
