"""From a run of planning to its report."""

import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

from subquad.core.spelling import listed
from subquad.methods.full import EXACT
from subquad.tools.measure.tradeoff import UNNOTICED
from subquad.tools.models import demo
from subquad.tools.models.dtypes import short_name
from subquad.tools.models.longer import extension_note, short_note
from subquad.tools.models.split_methods import split_note
from subquad.tools.plan import choice
from subquad.tools.plan.loads import PlanInputs
from subquad.tools.plan.planning import requests_of
from subquad.tools.plan.planning_results import Planned, Verified
from subquad.tools.plan.run import Made
from subquad.tools.plan.schema import PlannedLayer, PlannedLength, PlanReport, Uniform, Verification
from subquad.tools.plan.settings import PlanSettings
from subquad.tools.runs.floor import OPTIONS, Floor

SCHEMA = 1


def report_of(made: Made, command: str | None = None) -> PlanReport:
    """All figures of a plan, and the command that the reader may give next."""
    planning, made_on = made.planning, made.plan.made_on
    lengths = [_length(planned, load) for planned, load in zip(planning.lengths, planning.loads, strict=True)]
    return PlanReport(
        kind="plan",
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=made_on["command"],
        versions=made_on["versions"],
        hardware=made_on["hardware"],
        settings={
            "floor": planning.floor.least,
            "floor_text": str(planning.floor),
            "minutes": planning.deadline.seconds / 60,
            "shift": planning.shift,
            "confidence": choice.CONFIDENCE,
            "lengths": [planned.length for planned in planning.lengths],
        },
        model=made.metadata,
        text=made_on["text"],
        lengths=lengths,
        headline=headline(lengths, planning.floor),
        notes=_notes(made),
        next=command,
    )


def next_command(made: Made, settings: PlanSettings, out: Path, compare: Callable[..., str]) -> str | None:
    """The command that compares the plan with other methods; None where it is exact attention at all lengths.

    It measures at the lengths at which the plan is not exact attention. `compare` makes it from the number of ranks and
    the settings.
    """
    lengths = tuple(planned.length for planned in made.planning.lengths if planned.verified is not None)
    if not lengths:
        return None
    shared = ("text", "column", *OPTIONS.values(), "extend", "new_tokens", "batch", "device", "seed")
    options = {name: getattr(settings, name) for name in shared}
    dtype = settings.dtype or short_name(getattr(torch, made.metadata["dtype"]))  # it was planned in its own
    options |= {"model": settings.model or demo.ENCODER, "dtype": dtype}
    ranks = made.planning.loads[0].group.count
    return compare(ranks, plans=(out,), lengths=lengths, **options)


def headline(lengths: list[PlannedLength], floor: Floor) -> str:
    """The effect of the plan, in a sentence."""
    gains = [_gain(planned, planned.verified, floor) for planned in lengths if planned.verified is not None]
    unproven = [f"at {p.length:,} tokens, {p.unproven}" for p in lengths if p.unproven is not None]
    first = f"This text does not tell methods apart: {'; '.join(unproven)}. " if unproven else ""
    undecided = [f"{p.length:,}" for p in lengths if p.least_seconds is not None]
    exact = [f"{p.length:,}" for p in lengths if p.verified is None and p.least_seconds is None]
    late = f" Nothing was decided at {listed(undecided)} tokens, for want of time." if undecided else ""
    if not gains:
        where = f"at {listed(exact)} tokens no" if undecided else "at no length does a"
        pays = "pays" if undecided else "pay"
        return f"{first}Stay with exact attention: {where} verified plan with {floor} {pays}.{late}"
    others = f"; exact attention at {listed(exact)} tokens" if exact else ""
    return f"{first}With {floor}: {', '.join(gains)}{others}.{late}"


def _gain(planned: PlannedLength, verified: Verification, floor: Floor) -> str:
    """The gain and the loss of a verified plan, and the gain of exact attention by another kernel without a loss."""
    speed = f"{verified.speedup:.2f}× the speed of exact attention at {planned.length:,} tokens"
    if (requests := planned.requests) is not None:
        speed += f" to the first token and {requests.speedup:.2f}× with {requests.new_tokens:,} new ones"
    fidelity = floor.describe(1 - verified.loss)
    if planned.lossless is None or planned.lossless < choice.FASTER or verified.loss < UNNOTICED:
        return f"{speed} ({fidelity})"
    return f"{speed} ({fidelity}; {planned.lossless:.2f}× is predicted without a loss)"


def _length(planned: Planned, load: PlanInputs) -> PlannedLength:
    return PlannedLength(
        length=planned.length,
        layers={str(number): _layer(planned, number, name) for number, name in sorted(planned.chosen.items())},
        rounds=[_verification(each) for each in planned.rounds],
        floors=planned.floors,
        passages=max((len(each) for by_name in planned.losses.values() for each in by_name.values()), default=0),
        tried=len({name for seconds in planned.screen.seconds.values() for name in seconds} - {EXACT}),
        batches=load.batches,
        model_ms=None if planned.passes is None else 1e3 * planned.passes.seconds,
        least_seconds=planned.least_seconds,
        verified=None if planned.verified is None else _verification(planned.verified),
        requests=requests_of(planned, load),
        exact_because=planned.why_exact,
        unproven=planned.unproven,
        without_attention=None if planned.without is None else 1 - planned.without,
        lossless=planned.lossless_speedup if planned.kernels and any(planned.losses.values()) else None,
        uniform=None if planned.uniform is None else _uniform(planned, planned.uniform),
    )


def _uniform(planned: Planned, name: str) -> Uniform:
    predicted = choice.total(planned.mean_losses, choice.uniform(planned.mean_losses, name))
    verified = planned.uniform_verified
    return Uniform(name, predicted) if verified is None else Uniform(name, predicted, verified.loss, verified.speedup)


def _layer(planned: Planned, number: int, name: str) -> PlannedLayer:
    seconds = planned.screen.seconds[str(number)]
    return PlannedLayer(
        method=name,
        start=0 if name == EXACT else planned.starts.get(name, planned.length),
        loss=planned.mean_losses[number][name],
        time=seconds[name] / seconds[EXACT],
        error=planned.screen.errors[str(number)].get(name),
    )


def _verification(verified: Verified) -> Verification:
    return Verification(verified.predicted, verified.loss, verified.bound, verified.speedup, len(verified.losses))


def _accepted(loss: float, shift: float) -> str:
    """A note on the loss that a plan may have on the text that it is made from."""
    watched = "`sq.audit` watches the error while the model serves."
    if shift == 1:
        lost = f"The loss of the minimum fidelity, {loss:.4f}, is accepted on this text"
        return f"{lost}; other text can lose more. {watched}"
    return (
        f"On this text a loss of {loss / shift:.4f} is accepted: the loss of the minimum fidelity, {loss:.4f}, divided "
        f"by the shift of {shift:g}, because other text can lose more. {watched}"
    )


def _of_requests(made: Made) -> list[str]:
    """Sentences on how requests were timed, and on whether the plan's steps are exact."""
    pairs = zip(made.planning.lengths, made.planning.loads, strict=True)
    timed = {load.length: r for planned, load in pairs if (r := requests_of(planned, load)) is not None}
    if not timed:
        return []
    notes = [
        "A request is the prefill, which gives the first new token, and a step on its cache (`DynamicCache`) of the "
        "median time for each further one: later steps read a few more tokens, which is not counted."
    ]
    approximate = {n: r.step_kl for n, r in timed.items() if not r.exact_steps}
    if not approximate:
        return [*notes, "The plan's steps are exact attention by construction, over the keys of its own prefill."]
    each = listed([f"{kl:.2g} nats after {n:,} tokens" for n, kl in approximate.items()])
    return [*notes, f"The plan's steps are not exact attention: their KL to an exact step is {each}."]


def _notes(made: Made) -> list[str]:
    notes = [
        f"{planned.length:,} tokens: exact attention, because {planned.why_exact}."
        for planned in made.planning.lengths
        if planned.why_exact
    ]
    notes += [
        f"{planned.length:,} tokens: the time sufficed for {listed(planned.left_out)}; more --minutes measure more."
        for planned in made.planning.lengths
        if planned.left_out
    ]
    notes += [_accepted(1 - made.planning.floor.least, made.planning.shift)]
    notes.append(
        "A bound assumes that passages are independent and that their losses are about normally distributed, or, for a "
        "metric that is right or wrong, that each loss is −1, 0 or 1. It is valid for text like the one that was "
        "planned on."
    )
    if short := made.plan.made_on.get("short_texts"):
        notes.append(short_note(short))
    if (limit := made.metadata.get("position_limit")) is not None and made.plan.lengths[-1] > limit:
        yarn = made.metadata["extended_to"] if made.metadata.get("rotary") else None
        notes.append(extension_note(limit, yarn, causal=made.metadata.get("kind") == "causal-lm"))
    notes += _of_requests(made)
    if any(load.batches is not None for load in made.planning.loads):
        notes.append(
            "Lengths are the most tokens of a text in a batch. Each text runs the plan of its own length, as it would "
            "alone, and was verified so."
        )
    else:
        notes.append(
            "Lengths between those that were planned run the plan of the next longer one, and were not verified."
        )
    spreads = [spread for planned in made.planning.lengths for spread in planned.screen.head_spread.values()]
    if spreads and (spread := statistics.median(spreads)) >= 1:
        notes.append(
            f"Within a layer, the largest error of a head is {spread:.1f} times the median head's (median over layers)."
        )
    if (ranks := made.planning.loads[0].group.count) > 1:
        notes.append(
            f"{split_note(ranks)} The plan has no baseline for `sq.audit`, which needs all tokens in one process."
        )
    notes += made.notes
    if made.plan.made_on.get("resumed"):
        notes.append(f"{made.plan.made_on['resumed']} units come from an earlier, interrupted run.")
    return notes
