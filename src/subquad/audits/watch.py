"""The audit of one layer: sampling of calls, counts, and the reaction to a call above the tolerance."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from subquad.audits.audit_passes import uncounted
from subquad.audits.exact_rows import exact_rows, relative_errors, sampled
from subquad.audits.sampling import OneOfEvery
from subquad.audits.statistics import Betting, RunningMoments
from subquad.kernels.tokens.padding import cleared_inputs
from subquad.kernels.transforms import transform
from subquad.methods import Full
from subquad.methods.core.call import Call

LEVELS = tuple(2.0 ** (half / 2) for half in range(-20, 5))  # errors of which one may be a baseline's: 0.001 to 4


@dataclass(frozen=True)
class AuditedCall:
    """The result of the audit of one call, which callbacks receive.

    `errors` are the relative errors of its rows, NaN where the exact row is not finite. `above` counts those that are
    not within the tolerance, NaN included. `evidence` is the layer's evidence of drift so far, None without a baseline.
    """

    number: int
    name: str
    call: int
    errors: tuple[float, ...]
    above: int
    exceeded: bool
    replaced: bool
    evidence: float | None
    seconds: float


@dataclass(frozen=True)
class AuditRules:
    """The rules by which every layer of a model is audited: the arguments of `subquad.audit`."""

    rows: int
    every: int
    tolerance: float
    allowed: float
    on_exceed: str
    report: Callable[[AuditedCall], None]  # called after each audited call, before anything is raised
    exceeded: Callable[[AuditedCall], Exception]


@dataclass
class Tally:
    """The counts of one layer. Times are those of the audited calls alone."""

    calls: int = 0
    audited: int = 0
    skipped: int = 0  # sampled, but with dropout, without a real query, or inside a transform of torch
    exceeded: int = 0
    replaced: int = 0
    undefined: int = 0  # rows whose exact result is not finite
    above: int = 0  # rows that are not within the tolerance
    squares: RunningMoments = field(default_factory=RunningMoments)  # of e², of all rows that have one
    # For each of `LEVELS`, the number of audited calls by their number of rows with a larger error.
    beyond: dict[float, Counter[int]] = field(default_factory=lambda: {level: Counter() for level in LEVELS})
    layer_seconds: float = 0.0
    audit_seconds: float = 0.0


class LayerWatch:
    """Runs the method of one bound method, and audits one call in every `every`, at a random place in each such block.

    `hides_padded_queries`: the layer's mask has the padding of keys alone, but its queries are the same tokens.
    """

    def __init__(self, number: int, name: str, method: str, rules: AuditRules, seed: int, hides_padded_queries: bool):
        self.number, self.name, self.method, self.rules = number, name, method, rules
        self.tally = Tally()
        self.drift: Betting | None = None
        self.usual_error = math.nan  # the baseline's
        self._hides_padded_queries = hides_padded_queries
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._picked = OneOfEvery(rules.every, seed)
        self._lock = threading.Lock()  # services call one model from several threads

    @torch.compiler.disable(reason="an audited layer is not compiled: it counts calls, and times some")  # type: ignore[untyped-decorator]
    def __call__(self, method: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Any:
        """Return the result of `method.run`, or exact attention if this audited call exceeds and is to be replaced."""
        mode = uncounted()
        if mode == "exact":
            return Full().run(*cleared_inputs(query, key, value, call.mask), call)
        number = self._next() if mode is None else None
        if number is None:
            return method.run(query, key, value, call)
        begun = time.perf_counter()
        rows = self._rows(query, key, call)
        sampling = time.perf_counter() - begun
        if rows is None:
            with self._lock:
                self.tally.skipped += 1
            return method.run(query, key, value, call)
        start = _now(query)
        result = method.run(query, key, value, call)
        between = _now(query)
        out = result[0] if call.wants_lse else result
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            cleared = cleared_inputs(query, key, value, call.mask)
            chosen = tuple(index.to(out.device) for index in rows)
            item, head, row = chosen
            errors = relative_errors(out[item, head, row], exact_rows(*cleared, call, rows)).tolist()
        above = beyond(errors, self.rules.tolerance)
        exceeded = above > self.rules.allowed * len(errors)
        replaced = exceeded and self.rules.on_exceed == "exact"
        if replaced:
            result = Full().run(*cleared_inputs(query, key, value, call.mask), call)
        seconds = _now(query) - between + sampling
        self._count(errors, above, exceeded, replaced, between - start, seconds)
        evidence = None if self.drift is None else self.drift.evidence
        audited = AuditedCall(
            self.number, self.name, number, tuple(errors), above, exceeded, replaced, evidence, seconds
        )
        self.rules.report(audited)
        if exceeded and self.rules.on_exceed == "raise":
            raise self.rules.exceeded(audited)
        return result

    def counted(self) -> Tally:
        """A copy of the counts, all of the same calls: other threads go on counting."""
        with self._lock:
            return copy.deepcopy(self.tally)

    def _next(self) -> int | None:
        """Count one call; its number where it is to be audited."""
        with self._lock:
            picked = self._picked(self.tally.calls)
            self.tally.calls += 1
            return self.tally.calls if picked else None

    def _rows(self, query: Tensor, key: Tensor, call: Call) -> Any:
        """The rows to compare; None where there is nothing to compare, or comparing would mean nothing."""
        if call.dropout_p > 0 or transform() is not None:
            return None
        valid = None
        if self._hides_padded_queries and query.shape[2] == key.shape[2]:
            valid = call.mask.key_padding(key.shape[2])
        with self._lock:
            return sampled(query, call.mask, valid, self.rules.rows, self._generator)

    def _count(
        self, errors: list[float], above: int, exceeded: bool, replaced: bool, layer: float, audit: float
    ) -> None:
        with self._lock:
            tally = self.tally
            tally.audited += 1
            tally.exceeded += exceeded
            tally.replaced += replaced
            tally.above += above
            for level, counts in tally.beyond.items():
                counts[beyond(errors, level)] += 1
            for error in errors:
                if error != error:
                    tally.undefined += 1
                else:
                    tally.squares.add(error**2)
            tally.layer_seconds += layer
            tally.audit_seconds += audit
            if self.drift is not None:
                self.drift.add(beyond(errors, self.usual_error) / len(errors))


def beyond(errors: Sequence[float], level: float) -> int:
    """The number of errors that are not within a level; NaN is not within any level."""
    return sum(not error <= level for error in errors)


def _now(x: Tensor) -> float:
    """Seconds, when the device has done all that it was given; only audited calls wait for it."""
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
    return time.perf_counter()
