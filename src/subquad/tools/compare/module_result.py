"""The result of `sq.compare`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from subquad.core.spelling import listed
from subquad.methods import Method, from_dict
from subquad.methods.full import EXACT
from subquad.tools.compare.distinguish import distinguished
from subquad.tools.compare.recommend import recommend
from subquad.tools.compare.schema import MethodReport
from subquad.tools.measure.without_attention import WITHOUT
from subquad.tools.modules.tables import Columns, as_markdown, as_terminal
from subquad.tools.report import cells
from subquad.tools.runs.floor import Floor
from subquad.tools.runs.records import to_plain

MODULE_ATTENTION = "full (the module's own)"


@dataclass(frozen=True)
class ModuleRecommendation:
    """The method to use, and why.

    Attributes:
        method: at the shortest length; None: stay with exact attention.
        by_length: the method at each length in tokens; None: stay with exact attention.
        headline: what to do, in a sentence.
        reasons: a sentence for each length, and what was tried.
    """

    method: Method | None
    by_length: dict[int, Method | None]
    headline: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return self.headline


@dataclass(frozen=True)
class ModuleComparison:
    """The result of `sq.compare`: fidelity, speed and memory of methods in a module. Prints as a table.

    Attributes:
        module: the class of the module.
        attention: where the methods ran: "sq.hf.swap", "sq.nn.swap" or "sq.intercept", with the number of layers or
            calls.
        metric: by what outputs were judged.
        min_fidelity: what the recommended method keeps.
        lengths: number of inputs measured at each length in tokens.
        methods: the records of `rows`.
        rows: a row for each method, exact attention first, as `report.json` of `subquad compare` has them:
            `fidelity` and `model` (time, speed-up, peak memory) by length, `reason` where the method was refused.
            `relative_error` has ‖out − exact‖ / ‖exact‖ of the output's first floating-point tensor by length, if it
            has one. With a score, `task` has its mean by length. Rows of `others` have the status "other". The last
            rows have the status "reference": "full (by sq.nn.swap)", if methods run there, and "without attention", in
            which the outputs of attention are 0.
        noise: by length, how far exact attention differs from itself, as a factor.
        notes: what a reader must know.
        causal: whether all attention that was called is causal, in which more settings make a method exact.
    """

    module: str
    attention: str
    metric: str
    min_fidelity: float
    lengths: dict[int, int]
    methods: tuple[MethodReport, ...]
    noise: dict[int, float]
    notes: tuple[str, ...]
    causal: bool = False

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """The rows as plain data."""
        return tuple(map(to_plain, self.methods))

    @property
    def recommendation(self) -> ModuleRecommendation:
        """At each length, the closest of the fastest rows that keep `min_fidelity`; exact attention if none proves it.

        A row must be clearly faster than exact attention, and its fidelity must prove something (`distinguished`).
        """
        floor, lengths = self._floor, list(self.lengths)
        rows, blind = self._distinguished
        result = recommend(rows, lengths, floor, max(lengths), self.noise, blind=blind)
        chosen = result.by_length or {}
        by_length = {n: _method_of(self.methods, chosen.get(str(n), EXACT)) for n in lengths}
        return ModuleRecommendation(by_length[min(lengths)], by_length, result.headline, tuple(result.reasons))

    @property
    def _distinguished(self) -> tuple[list[MethodReport], dict[int, str]]:
        without = {int(n): value for n, value in self._fidelity_without.items()}
        return distinguished(self.methods, list(self.lengths), self._floor, without)

    @property
    def _floor(self) -> Floor:
        return Floor("fidelity", self.min_fidelity, self.causal)

    @property
    def _fidelity_without(self) -> dict[str, float]:
        """The fidelity without attention by length."""
        return next((row.fidelity or {} for row in self.methods if row.method == WITHOUT), {})

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, which can be written as JSON."""
        advice, names = self.recommendation, [each.name.replace("methods", "rows") for each in fields(self)]
        values = {name: getattr(self, name) for name in names}
        for name in ("lengths", "noise"):
            values[name] = {str(length): value for length, value in values[name].items()}
        by_length = {str(length): None if m is None else str(m) for length, m in advice.by_length.items()}
        chosen = {"method": by_length[str(min(self.lengths))], "by_length": by_length}
        plain: dict[str, Any] = to_plain({**values, "recommendation": {**vars(advice), **chosen}})
        return plain

    def __str__(self) -> str:
        return as_terminal(self._columns, self._lines, [self._head, *self._sentences])

    def _repr_markdown_(self) -> str:
        return as_markdown(self._columns, self._lines, [self._head, *self._sentences])

    @property
    def _head(self) -> str:
        return f"{self.module}, by {self.attention}; fidelity: {self.metric}; speed: relative to {MODULE_ATTENTION}"

    @property
    def _columns(self) -> Columns:
        scored = ["score"] if any(row.task for row in self.methods) else []
        titles = ["tokens", "method", *scored, "fidelity", *self._error_title, "ms", "speed", "extra MiB"]
        return [(title, title not in ("method",)) for title in titles]

    @property
    def _error_title(self) -> list[str]:
        """The head of the column of relative errors, if they are known and the fidelity does not show them already."""
        known = any(row.relative_error for row in self.methods)
        return ["rel. error"] if known and self.metric != "relative-error" else []

    @property
    def _lines(self) -> list[list[str]]:
        rows = sorted((row for row in self.methods if row.status != "refused"), key=_order)
        return [self._line(row, length) for length in self.lengths for row in rows]

    def _line(self, row: MethodReport, length: int) -> list[str]:
        at = str(length)
        cost = row.cost("model", at)
        name = MODULE_ATTENTION if row.status == "exact" else row.method
        score = [cells.number(row.task.get(at), 4).text] if row.task else []
        error = [cells.number((row.relative_error or {}).get(at), 4).text for _ in self._error_title]
        return [
            f"{length:,}",
            name,
            *score,
            cells.number((row.fidelity or {}).get(at), 4).text,
            *error,
            cells.size(cost.ms).text,
            cells.speedup(cost.speedup, cost.verdict).text,
            cells.size(cost.extra_mib).text,
        ]

    @property
    def _sentences(self) -> list[str]:
        refused = _by_reason((row.method, row.reason or "") for row in self.methods if row.status == "refused")
        notes = _by_reason((row.method, note) for row in self.methods for note in row.remarks or [])
        lines = [*self._without_attention, self.recommendation.headline]
        lines += [f"{listed(names)}: {note}" for note, names in notes.items()]
        lines += [f"Not run: {listed(names)}: {reason}" for reason, names in refused.items()]
        return [*lines, *self.notes]

    @property
    def _without_attention(self) -> list[str]:
        """At which lengths the fidelity does not tell methods apart, in a sentence."""
        fidelity, (_, blind) = self._fidelity_without, self._distinguished
        lengths = [at for at in self.lengths if at not in blind]
        kept = {f"{at:,}": fidelity[str(at)] for at in lengths if fidelity.get(str(at), -math.inf) >= self.min_fidelity}
        if not kept:
            return []
        return [
            f"Without attention the fidelity is still {min(kept.values()):.4f} at {listed(list(kept))} tokens, so "
            f"min_fidelity={self.min_fidelity:g} does not tell methods apart there; use a trained module, another "
            "metric or a higher min_fidelity."
        ]


def _order(row: MethodReport) -> int:
    """Both rows of exact attention first, and the row without attention last."""
    if row.status == "exact":
        return 0
    if row.status == "reference":
        return 3 if row.method == WITHOUT else 1
    return 2


def _by_reason(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names of the methods with each reason."""
    names: dict[str, list[str]] = {}
    for name, reason in pairs:
        names.setdefault(reason, []).append(name)
    return names


def _method_of(rows: Sequence[MethodReport], name: str) -> Method | None:
    row = next(row for row in rows if row.method == name)
    return None if row.status == "exact" else from_dict(row.settings)
