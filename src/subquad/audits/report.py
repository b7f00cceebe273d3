"""The results of an audit so far, as numbers and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from subquad.audits.statistics import RunningMoments, mean_upper, share_upper

LARGEST = 1.0  # e² that the bound of its mean assumes: an output of 0 has e = 1


@dataclass(frozen=True)
class LayerReport:
    """The audit of one layer, or of all together (`name` is "all").

    As many rows of each audited call are compared, so every call counts once, however long it is: `mean_square` is an
    unbiased estimate of the mean over the layer's calls of each call's mean e² over its real rows, and `share` of the
    mean of each call's share of rows above the tolerance, rows without a finite exact result included. If calls differ
    in length, these are not the means over all rows, of which long calls have more. `mean_square_bound` is the
    empirical Bernstein bound at confidence 1 − δ for the audited calls; it assumes e² ≤ 1, and is None where an audited
    row had more, or fewer than 2 rows were audited. `share_bound` is Clopper and Pearson's. `evidence` is the largest
    capital that the test of drift had so far. `overhead` is the time of auditing divided by that of the layer, from the
    audited calls; None before the first.
    """

    name: str
    method: str
    calls: int
    audited: int
    skipped: int
    rows: int
    undefined: int
    exceeded: int
    replaced: int
    mean_square: float | None
    mean_square_bound: float | None
    largest: float
    share: float | None
    share_bound: float | None
    evidence: float | None
    drifted: bool | None
    overhead: float | None


@dataclass(frozen=True)
class NextTokenReport:
    """Next tokens of an audited causal language model compared with those of exact attention.

    As many positions of each audited prompt are compared, so every prompt counts once, however long it is: `kl` is an
    unbiased estimate of the mean over prompts of each one's mean KL(exact ‖ method) in nats at its real positions, and
    `agreement` of the mean of each one's share of positions with the exact top token. Their bounds are at confidence
    1 − δ, for the audited prompts: `kl_bound` is empirical Bernstein's, assumes KL ≤ 1, and is None where a position
    had more or none; `agreement_bound` is Clopper and Pearson's, from below. `last_kl` and `last_agreement` are those
    of the last token of each prompt, which decides the first token that is generated. `evidence` is the largest capital
    that the test of the floor had so far. Positions without a finite KL are `undefined`, and count as another top
    token.
    """

    prompts: int
    audited: int
    skipped: int
    positions: int
    undefined: int
    kl: float | None
    kl_bound: float | None
    agreement: float | None
    agreement_bound: float | None
    last_kl: float | None
    last_agreement: float | None
    floor: str | None
    evidence: float | None
    alarm: bool | None

    def __str__(self) -> str:
        counts = f"next tokens: {self.audited:,} of {self.prompts:,} prompts, {self.positions:,} positions"
        counts += _undefined(self.undefined)
        if not self.audited:
            return counts
        estimates = (
            f"KL {_number(self.kl)} (≤ {_number(self.kl_bound)}), same top token {_number(self.agreement)} "
            f"(≥ {_number(self.agreement_bound)}); at the last token KL {_number(self.last_kl)}, same top token "
            f"{_number(self.last_agreement)}"
        )
        if self.alarm is None:
            return f"{counts}: {estimates}"
        return f"{counts}: {estimates}; {self.floor}: {'alarm' if self.alarm else 'no alarm'} ({self.evidence:.3g})"


@dataclass(frozen=True)
class EmbeddingReport:
    """Embeddings of an audited model compared with those of exact attention.

    `fidelity` is the mean cosine of the audited items, and `fidelity_bound` its empirical Bernstein bound from below at
    confidence 1 − δ, which assumes cosines of at least 0 and is None otherwise; `lowest` is the smallest. `evidence` is
    the largest capital that the test of the floor had so far. Items without a finite cosine are `undefined`, and count
    as a cosine of 0.
    """

    inputs: int
    audited: int
    skipped: int
    items: int
    undefined: int
    fidelity: float | None
    fidelity_bound: float | None
    lowest: float | None
    floor: str
    evidence: float | None
    alarm: bool | None

    def __str__(self) -> str:
        counts = f"embeddings: {self.audited:,} of {self.inputs:,} inputs, {self.items:,} items"
        counts += _undefined(self.undefined)
        if not self.audited:
            return counts
        metrics = (
            f"fidelity {_number(self.fidelity, 4)} (≥ {_number(self.fidelity_bound)}), lowest {_number(self.lowest, 4)}"
        )
        return f"{counts}: {metrics}; {self.floor}: {'alarm' if self.alarm else 'no alarm'} ({self.evidence:.3g})"


@dataclass(frozen=True)
class AuditReport:
    """The results of an audit: one record per layer, in the model's order, and one of all rows together.

    `tolerance` is None if no row is too far off; rows without a finite result alone are above it then. `next_tokens` is
    about the output of a causal language model, and `embeddings` about that of a model whose plan is for embeddings.
    """

    layers: tuple[LayerReport, ...]
    overall: LayerReport
    tolerance: float | None
    confidence: float
    next_tokens: NextTokenReport | None = None
    embeddings: EmbeddingReport | None = None

    @property
    def alarm(self) -> bool | None:
        """True if the output does not keep its floor, or a layer has drifted; None without a floor and a baseline."""
        outputs = [each.alarm for each in (self.next_tokens, self.embeddings) if each is not None]
        alarms = [alarm for alarm in (*outputs, self.overall.drifted) if alarm is not None]
        return any(alarms) if alarms else None

    def layer(self, name: str) -> LayerReport:
        """The record of the layer of this name."""
        return next(layer for layer in self.layers if layer.name == name)

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        sure = f"{100 * self.confidence:g} %"
        head = ["layer", "method", "calls", "audited", "rows", "mean e²", f"≤ at {sure}"]
        lines = [
            [
                *head,
                "not finite" if self.tolerance is None else f"e > {self.tolerance:g}",
                f"≤ at {sure}",
                "drift",
                "overhead",
            ]
        ]
        for layer in (*self.layers, self.overall):
            counts = [f"{layer.calls:,}", f"{layer.audited:,}", f"{layer.rows:,}"]
            squares = [_number(layer.mean_square), _number(layer.mean_square_bound)]
            shares = [_percent(layer.share), _percent(layer.share_bound)]
            drift = "–" if layer.drifted is None else f"{'yes' if layer.drifted else 'no'} ({layer.evidence:.3g})"
            lines.append([layer.name, layer.method, *counts, *squares, *shares, drift, _percent(layer.overhead)])
        # Not a table of rich, which draws from Python's global generator.
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        notes = [
            f"{count:,} {what}"
            for count, what in (
                (self.overall.undefined, "audited rows have an exact result that is not finite; they count as above"),
                (self.overall.exceeded, "audited calls exceeded the tolerance"),
                (self.overall.replaced, "calls were computed again by exact attention"),
                (self.overall.skipped, "sampled calls could not be audited (dropout, no real query, a transform)"),
            )
            if count
        ]
        outputs = [str(each) for each in (self.next_tokens, self.embeddings) if each is not None]
        return "\n".join([*(line.rstrip() for line in padded), *notes, *outputs])


def summary(
    name: str,
    method: str,
    tallies: Sequence[Any],  # of `watch.Tally`
    delta: float,
    evidence: float | None,
    drifted: bool | None,
) -> LayerReport:
    """One record of these tallies together."""
    squares = RunningMoments()
    for tally in tallies:
        squares.join(tally.squares)
    undefined = sum(tally.undefined for tally in tallies)
    rows = squares.count + undefined
    above = sum(tally.above for tally in tallies)
    calls, audited = sum(tally.calls for tally in tallies), sum(tally.audited for tally in tallies)
    seconds, layer = sum(tally.audit_seconds for tally in tallies), sum(tally.layer_seconds for tally in tallies)
    bound = None
    if squares.largest <= LARGEST and not undefined:
        bound = mean_upper(squares.mean, squares.variance, squares.count, delta, LARGEST)
    return LayerReport(
        name=name,
        method=method,
        calls=calls,
        audited=audited,
        skipped=sum(tally.skipped for tally in tallies),
        rows=rows,
        undefined=undefined,
        exceeded=sum(tally.exceeded for tally in tallies),
        replaced=sum(tally.replaced for tally in tallies),
        mean_square=squares.mean if squares.count else None,
        mean_square_bound=bound,
        largest=math.sqrt(squares.largest),
        share=above / rows if rows else None,
        share_bound=share_upper(above, rows, delta) if rows else None,
        evidence=evidence,
        drifted=drifted,
        overhead=seconds / (layer / audited * calls) if layer > 0 else None,
    )


def _undefined(count: int) -> str:
    return f" ({count:,} undefined)" if count else ""


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"
