"""From the recommendation of each length to one model: which method runs from how many tokens on, and in which dtype.

`--save` saves this model, and the code that is printed makes it. A model has one dtype, and `by-length` has its methods
by the number of tokens. In a causal language model `by-length` would run the methods of all its steps on a long prompt,
and a plan or a mixture cannot be a step of it: there, one row runs at all lengths.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from subquad import hf
from subquad.core.errors import InputError
from subquad.core.spelling import listed
from subquad.hf.plans import joined
from subquad.methods import BoundMethod, ByLength, Full, Method, from_dict
from subquad.methods.core.mixture import is_mixture
from subquad.methods.full import EXACT
from subquad.tools.compare import recommend, run
from subquad.tools.compare.recommend import describe_performance, fastest, is_faithful, is_full
from subquad.tools.compare.schema import Attachment, MethodReport, Report
from subquad.tools.compare.settings import CompareSettings
from subquad.tools.models.compare_rows import IN, CompareRow
from subquad.tools.models.dtypes import FP32, TORCH
from subquad.tools.models.saved_card import Measured
from subquad.tools.models.saving import Chosen
from subquad.tools.report import cells
from subquad.tools.runs.floor import Floor

Row = TypeVar("Row")
Rows = Mapping[int, MethodReport]  # by length, in tokens


def attachment(
    methods: Sequence[MethodReport],
    lengths: Sequence[int],
    floor: Floor,
    tokens: int,
    noise: Mapping[int, float],
    limit: int | None,
) -> Attachment | None:
    """The attention of a model that follows the recommendation; None if exact attention in fp32 stays at all lengths.

    The dtype is that of the longest length with a recommendation. If exact attention in that dtype does not keep the
    floor at a length without one, it is that of the next shorter. Lengths that exceed both the `limit` of the model's
    own positions and the longest one with a recommendation count no more: the model will not accept them. At a length
    whose speeds are too noisy, exact attention is chosen, and what runs there must keep the floor. The other arguments
    are those of `recommend`.
    """
    best = fastest(methods, lengths, floor, tokens, noise)
    recommended = {n: row for n, row in sorted(best.items(), reverse=True) if row is not None}
    if not recommended:
        return None
    reach = math.inf if limit is None else max(limit, *recommended)
    within = [n for n in lengths if n <= min(reach, tokens)]
    judged = (within, floor, tokens, noise)
    noisy = [n for n in within if n not in best]
    for dtype in dict.fromkeys([*map(_dtype, recommended.values()), FP32]):
        rows = [row for row in methods if row.status != "refused" and _dtype(row) == dtype]
        exact = next(row for row in rows if is_full(row))
        chosen = dict.fromkeys(noisy, exact) | {n: row or exact for n, row in fastest(rows, *judged).items()}
        steps = _steps(chosen, floor)
        if steps is None:
            continue
        runs = {n: running_at(steps, n) for n in chosen}
        approximate = [(n, row) for n, row in runs.items() if n in best and row.status != "exact"]
        pays = [n for n, row in approximate if recommend.is_faster(row, str(n))]
        if not pays or not all(is_faithful(row, str(n), floor) for n, row in runs.items()):
            continue
        named = {str(start): row.method for start, row in steps.items()}
        return Attachment(dtype=dtype, steps=named, lengths=pays, note=_note(best, chosen, runs, floor) or None)
    return None


def running_at(steps: Mapping[int, Row], length: int) -> Row:
    """The step that runs in an input of this length, from those by the number of tokens from which on they run."""
    return steps[max(start for start in steps if start <= length)]


def described(attached: Attachment) -> str:
    """The methods that run and the lengths at which they do, in words."""
    names = {int(start): name.partition(IN)[0] for start, name in attached.steps.items()}
    dtype = "" if attached.dtype == FP32 else f"{IN}{attached.dtype}"
    (_, first), *later = names.items()
    if not later:
        return f"{first}{dtype}"
    each = [f"{first} below {later[0][0]:,} tokens", *(f"{name} from {start:,} tokens on" for start, name in later)]
    return f"{listed(each)}{f',{dtype}' if dtype else ''}"


def chosen_by_comparison(settings: CompareSettings, report: Report, out: Path) -> Chosen | None:
    """The methods that a comparison recommends, each from its length on; None where exact attention in fp32 stays."""
    attached = report.recommendation.attachment
    if attached is None:
        return None
    # What was fitted is in the folder. The dtype is given, because another machine may have measured another one.
    c = run.prepare(replace(settings, dtype=attached.dtype), out)
    names = {int(start): name for start, name in attached.steps.items()}
    rows = {row.name: row for row in c.rows}
    if missing := [name for name in names.values() if name not in rows]:
        raise InputError(f"this machine does not compare {listed(missing)}: --save on the one that measured it")
    reports = {method.method: method for method in report.methods}
    lines = [
        f"{n:,} tokens: {describe_performance(reports[running_at(names, n)], str(n), c.floor)}."
        for n in attached.lengths
    ]
    noise = "" if report.noise is None else report.noise.says
    measured = Measured(lines, report.command, report.hardware, attached.dtype, noise=noise)
    methods = methods_by_layer({start: rows[name] for start, name in names.items()}, c.pretrained.model)
    dtype, lengths = attached.dtype, attached.lengths
    return Chosen(described(attached), methods, lengths, measured, TORCH[dtype], pays_in_dtype=dtype != FP32)


def methods_by_layer(steps: Mapping[int, CompareRow], model: Any) -> dict[int, Method | BoundMethod]:
    """The methods of each layer from their numbers of tokens on; a layer that a row leaves out is exact there."""
    layers = {layer.number: layer for layer in hf.find_layers(model)}
    numbers = sorted({number for row in steps.values() for number in row.layers})
    if len(steps) == 1:
        return {number: steps[0].at(number) for number in numbers}
    methods: dict[int, Method | BoundMethod] = {}
    for number in numbers:
        each = {start: row.at(number) if number in row.layers else Full() for start, row in steps.items()}
        method, bound = joined(layers[number], each)
        methods[number] = method if bound is None else bound
    return methods


def _dtype(row: MethodReport) -> str:
    return row.dtype or FP32


def _steps(chosen: Rows, floor: Floor) -> dict[int, MethodReport] | None:
    """The rows by the number of tokens from which on they run; None if they cannot be joined and no row does alone."""
    if len({row.method for row in chosen.values()}) == 1 or _can_be_joined(chosen, floor):
        return _joined(chosen, floor)
    for _, row in sorted(chosen.items(), reverse=True):
        if not is_full(row) and all(is_faithful(row, str(n), floor) for n in chosen):
            return {0: row}
    return None


def _can_be_joined(chosen: Rows, floor: Floor) -> bool:
    """True if the rows can be the steps of a `by-length` that takes no longer than each of them does alone."""
    methods = [from_dict(row.settings) for row in chosen.values()]
    if floor.of_next_tokens or any(map(is_mixture, methods)) or any(row.plan for row in chosen.values()):
        return False
    try:
        ByLength(dict(enumerate(methods)))
    except ValueError:  # of different seeds
        return False
    return True


def _joined(chosen: Rows, floor: Floor) -> dict[int, MethodReport]:
    """One step for each change of the method, which begins at the length where it is recommended, or before.

    After exact attention, a method begins at its crossover, if that is known and between the two lengths. After a
    method that does not keep the floor at the next length, exact attention begins right above the length before.
    """
    (before, first), *longer = sorted(chosen.items())
    steps = {0: first}
    for length, row in longer:
        previous = steps[max(steps)]
        if row.method != previous.method:
            start = length
            if is_full(row) and not is_faithful(previous, str(length), floor):
                start = before + 1
            elif is_full(previous):
                start = min(length, max(before + 1, math.ceil(cells.known(row.crossover) or length)))
            steps[start] = row
        before = length
    return steps


def _note(best: Mapping[int, MethodReport | None], chosen: Rows, runs: Rows, floor: Floor) -> str:
    """The lengths at which something else runs than what is recommended there, and why; empty if there are none."""
    recommended = {n: EXACT if row is None else row.method for n, row in best.items()}
    differing = [n for n, row in runs.items() if n in recommended and row.method != recommended[n]]
    if not differing:
        return ""
    reasons = []
    if any(chosen[n].method != recommended[n] for n in differing):
        reasons.append("a model has one dtype")
    if any(runs[n].method != chosen[n].method for n in differing):
        steps = "by-length would run both methods on a long prompt" if floor.of_next_tokens else "they cannot be joined"
        reasons.append(steps)
    each = listed([f"{runs[n].method} at {n:,} tokens" for n in differing])
    return f"One model for all lengths runs {each}, because {listed(reasons)}."
