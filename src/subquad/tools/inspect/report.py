"""From the results of an inspection's units to its report."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime

import torch
from torch.nn.utils.rnn import pad_sequence

from subquad.methods import LearnedHash
from subquad.tools.inspect.run import LAYER, MAPS, SPECTRUM, InLayer, InspectedLayer, Inspection, InspectRow
from subquad.tools.inspect.schema import (
    VARIANTS,
    Inspected,
    InspectedFit,
    InspectedShares,
    InspectReport,
    LayerMetrics,
    LayerSpectrum,
    Maps,
    Spectrum,
    UtilityMetrics,
)
from subquad.tools.inspect.settings import InspectSettings
from subquad.tools.measure.balance import BucketSizes
from subquad.tools.measure.singular_values import heat_map_index
from subquad.tools.runs import machine
from subquad.tools.runs.options import as_command

SHARP = (
    "Spectrum: a curve that rises at once means that each matrix of weights is close to one of low rank. It does not "
    "mean that the same low rank serves the next input: whether a projection that does not look at the input "
    "(linformer) finds it is another question, which subquad compare answers."
)


def report_of(inspection: Inspection, asked: InspectSettings) -> InspectReport:
    """All figures, with what they depend on. `asked` are the settings as the user gave them: those of the command."""
    x, s = inspection, inspection.settings
    text, tokens = x.reading.metadata(s.text), [_readable(x, token) for token in x.items[0][: s.tokens]]
    return InspectReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=as_command("inspect", asked),
        versions=machine.versions(),
        hardware=machine.hardware(s.device),
        settings={"buckets": s.buckets, "length": s.length, "keys": x.keys, "sequences": len(x.items)}
        | {name: getattr(s, name) for name in ("layer", "head", "tokens", "seed")},
        model=x.pretrained.metadata(),
        text={name: text[name] for name in ("source", "documents", "tokens")},
        bounds={str(n): _mean([unit.bound for unit in _samples_of(x, n)]) for n in x.layers},
        methods=[_inspected(x, row) for row in x.rows],
        maps=Maps(s.layer or 0, s.head, tokens, x.results[MAPS()]),
        fits=[_fit(row) for row in x.rows if row.history and isinstance(row.method, LearnedHash)],
        notes=_notes(x),
        spectrum=_spectrum(x) if s.spectrum else None,
    )


def _samples_of(x: Inspection, layer: int) -> list[InspectedLayer]:
    return [x.results[LAYER(i, layer)] for i in range(len(x.items))]


def _spectrum(x: Inspection) -> Spectrum:
    assert x.settings.length is not None
    layers = {str(n): _layer_spectrum([x.results[SPECTRUM(i, n)] for i in range(len(x.items))]) for n in x.layers}
    return Spectrum(x.curve, heat_map_index(x.settings.length), layers)


def _layer_spectrum(samples: Sequence[LayerSpectrum]) -> LayerSpectrum:
    heads = zip(*(unit.curves for unit in samples), strict=True)  # of each head its sequences
    curves = [[round(share, 6) for share in _mean(sequences)] for sequences in heads]
    return LayerSpectrum(curves, _mean([unit.needed for unit in samples]))


def _readable(x: Inspection, token: int) -> str:
    text = x.pretrained.tokenizer.decode([token])
    return text.strip() or repr(text)[1:-1]


def _fit(row: InspectRow) -> InspectedFit:
    functions = next(iter(row.bounds.values())).learned
    return InspectedFit(row.label, getattr(functions, "buckets", 0), row.history)


# ---------------------------------------------------------------------- one method


def _inspected(x: Inspection, row: InspectRow) -> Inspected:
    layers = {str(n): _layer([unit.methods[row.label] for unit in _samples_of(x, n)]) for n in x.layers}
    hashed = [layer for layer in layers.values() if layer.queries]
    imbalance = _shares(hashed) if hashed else None
    return Inspected(row.label, row.method.to_dict(), row.calibrated, layers, imbalance)


def _layer(samples: Sequence[InLayer]) -> LayerMetrics:
    """One layer of one method, from its sequences."""
    if samples[0].reason is not None:
        return LayerMetrics(samples[0].reason)
    utilities = [unit.utility for unit in samples if unit.utility]
    metrics = LayerMetrics(
        utility={each: _utility([unit[each] for unit in utilities]) for each in VARIANTS} if utilities else None,
        queries=[unit.queries for unit in samples if unit.queries is not None] or None,
        keys=[unit.keys for unit in samples if unit.keys is not None] or None,
    )
    return replace(metrics, imbalance=_shares([metrics])) if metrics.queries else metrics


def _utility(samples: Sequence[UtilityMetrics]) -> UtilityMetrics:
    return UtilityMetrics(*(_mean([getattr(unit, name) for unit in samples]) for name in ("utility", "keys", "bound")))


def _mean(lists: Sequence[Sequence[float]]) -> list[float]:
    """Place by place."""
    return [sum(column) / len(column) for column in zip(*lists, strict=True)]


def _shares(layers: Sequence[LayerMetrics]) -> InspectedShares:
    queries, keys = (
        [torch.tensor(head) for layer in layers for sequence in getattr(layer, side) for head in sequence]
        for side in ("queries", "keys")
    )
    exists = [torch.ones_like(head).bool() for head in queries]  # layers may have different numbers of buckets
    sizes = BucketSizes(*(pad_sequence(rows, batch_first=True)[None] for rows in (queries, keys, exists)))
    shares = asdict(sizes.imbalance())
    return InspectedShares(**{name: None if math.isnan(one) else one for name, one in shares.items()})


# ---------------------------------------------------------------------- what a reader must know


def _notes(x: Inspection) -> list[str]:
    s = x.settings
    notes = [
        "All figures are taken on the queries and keys of the model with exact attention, on the same sequences.",
        f"The upper bound is that of {x.keys} keys per query, N/B with B = {s.buckets}. A method that chooses more may "
        "be above it, and is never above the bound at its own number of keys.",
    ]
    if any("causal" in layer["kind"] for layer in x.pretrained.metadata()["layers"]):
        notes.append("Causal layers: utilities are those of causal attention, and no method sees a later key.")
    notes += [
        f"Layer {number} runs {times} times on each sequence with the same parameters; its figures are the last ones."
        for number, times in x.calls.items()
        if times > 1
    ]
    if s.spectrum:
        notes.append(SHARP)
    if any(row.calibrated is False for row in x.rows):
        notes.append('"Not calibrated": learned parameters as they start, before anything was fitted to this model.')
    notes += [row.note for row in x.rows if row.note]
    if blind := [row.label for row in x.rows if row.by_layer and not row.chooses_keys]:
        why = "these do not declare which keys a query attends to"
        notes.append(f"In the attention maps alone, because {why}: {', '.join(blind)}.")
    notes += [*x.pretrained.notes, *(note for row in x.rows for note in _refused(x, row))]
    if len(x.reading.tokens) < (s.length or 0):
        notes.append(f"The text has {len(x.reading.tokens)} tokens in all; longer sequences repeat it.")
    return notes + x.resumed_note


def _refused(x: Inspection, row: InspectRow) -> list[str]:
    """Sentences on the layers that a method could not run in, by reason."""
    by_reason: dict[str, list[str]] = {}
    for number in x.layers:
        reason = _samples_of(x, number)[0].methods[row.label].reason
        if reason:
            by_reason.setdefault(reason, []).append(str(number))
    return [f"{row.label} is left out in layers {', '.join(at)}: {reason}" for reason, at in by_reason.items()]
