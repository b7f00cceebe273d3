"""`subquad inspect`: what the methods choose in this model, and their share of exact attention.

Attention utility, balance of buckets and attention maps, on the queries and keys of the model with exact attention. The
work is cut into units whose results are kept until the report is written, so that an interrupted run resumes:

    layer/<i>/<number>      the i-th sequence in one layer: utilities and bounds, sizes of buckets
    spectrum/<i>/<number>   the same sequence and layer, where asked for: singular values of exact attention's weights
    maps                    attention weights of one head on the first sequence
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from subquad import hf
from subquad.core.errors import InputError, as_input_error
from subquad.hf.plans import load_plan
from subquad.methods import BoundMethod, Full, Method, parse_method
from subquad.methods.full import EXACT
from subquad.tools.data.texts import read_documents, report_folders, standard_library
from subquad.tools.inspect.schema import LayerSpectrum, UtilityMetrics, Variant
from subquad.tools.inspect.settings import InspectSettings
from subquad.tools.measure.balance import bucket_sizes
from subquad.tools.measure.capture import LayerInputs, recorded
from subquad.tools.measure.fidelity import attention_weights
from subquad.tools.measure.hooks import ChoosesKeys, Hashes, at_length, at_n_b, inner
from subquad.tools.measure.singular_values import cumulative, heat_map_index, needed, singular_values
from subquad.tools.measure.utility import utilities
from subquad.tools.models.compare_rows import check_names, mark_of
from subquad.tools.models.passages import TokenizedText, read
from subquad.tools.models.pretrained import Pretrained, check_model, load
from subquad.tools.runs import machine
from subquad.tools.runs.jobs import Job, JobKind, Progress, silent
from subquad.tools.runs.runner import JobRun

POINTS = 96  # of a curve of the spectrum


@dataclass(frozen=True)
class InspectRow:
    """One method in one model: what runs in each layer."""

    label: str
    method: Method
    by_layer: Mapping[int, Method | BoundMethod]
    calibrated: bool | None = None  # None: no learned parameters
    history: list[dict[str, Any]] = field(default_factory=list)  # the history of its fit
    missing: str = "the adapter has no such layer"  # the reason why a layer is not in `by_layer`
    note: str | None = None  # the layers of a plan and their methods, in words
    folder: str | None = None  # of an adapter or a plan

    @property
    def bounds(self) -> dict[int, BoundMethod]:
        """Those with learned parameters."""
        return {number: method for number, method in self.by_layer.items() if isinstance(method, BoundMethod)}

    @property
    def chooses_keys(self) -> bool:
        """True if in some layer it is known which keys a query meets."""
        return any(isinstance(inner(method), ChoosesKeys) for method in self.by_layer.values())

    def refusal(self, inputs: LayerInputs) -> str | None:
        """The reason why it cannot run on these inputs; None if it can."""
        method = self.by_layer.get(inputs.number)
        if method is None:
            return self.missing
        query, key, options = inputs.query, inputs.key, inputs.options
        if inner(method).traits.needs_hidden:
            return f"{inner(method).name!r} reads the layer's input, and only queries, keys and values are recorded"
        return inner(method).refuses(
            options["mask"],
            bias=options["bias"] is not None,
            cross=query.shape[2] != key.shape[2],
        )


def measure(settings: InspectSettings, out: Path, progress: Progress = silent) -> "Inspection":
    """Measure everything and return the inspection with its results. Finished units are kept under `out`.

    Raises:
        InputError: something in the settings does not work; the message has the remedy.
    """
    progress("loading", 0, 1)
    inspection = Inspection.prepare(settings)
    report_folders(progress, settings.text)
    inspection.check_recorded()
    inspection.finish(out, progress)
    return inspection


def check(settings: InspectSettings) -> None:
    """Raise InputError for what is wrong in the settings, as far as it shows before the model is loaded."""
    _asked_methods(settings)
    check_model(settings.model, settings.device)


def _asked_methods(settings: InspectSettings) -> tuple[list[Method], list[str] | None]:
    """The methods and the documents that the settings name."""
    for name in ("buckets", "sequences", "tokens"):
        if getattr(settings, name) < 1:
            raise InputError(f"--{name} {getattr(settings, name)} must be at least 1")
    texts = [method.replace("{buckets}", str(settings.buckets)) for method in settings.methods]
    with as_input_error():
        methods = list(dict.fromkeys(map(parse_method, texts)))
    return methods, read_documents(settings.text, settings.column) if settings.text else None


@dataclass
class InLayer:
    """One method in one layer on one sequence, as in `LayerMetrics`."""

    reason: str | None = None
    utility: dict[Variant, UtilityMetrics] | None = None
    queries: list[list[int]] | None = None  # in each bucket, for each head
    keys: list[list[int]] | None = None


@dataclass
class InspectedLayer:
    """One layer on one sequence."""

    bound: list[float]  # for each head
    methods: dict[str, InLayer]


LAYER: JobKind[InspectedLayer] = JobKind(
    "layer", InspectedLayer, lambda i, number: f"what methods choose in layer {number}, sequence {i + 1}"
)
SPECTRUM: JobKind[LayerSpectrum] = JobKind(
    "spectrum", LayerSpectrum, lambda i, number: f"singular values in layer {number}, sequence {i + 1}"
)
MAPS: JobKind[dict[str, list[list[float]]]] = JobKind("maps", dict[str, list[list[float]]], "attention maps".format)


@dataclass(kw_only=True)
class Inspection(JobRun):
    """An inspection: model, text and rows at hand, and the results of the units so far."""

    settings: InspectSettings
    pretrained: Pretrained
    reading: TokenizedText
    rows: list[InspectRow]
    items: list[list[int]]  # the sequences
    recording: tuple[int, dict[int, LayerInputs]] | None = None  # the inputs of the sequence that was last at work
    calls: Counter[int] = field(default_factory=Counter)  # how often each layer runs on a sequence

    @classmethod
    def prepare(cls, settings: InspectSettings) -> "Inspection":
        """Check all that the user gave, cheapest first, and load the model."""
        methods, documents = _asked_methods(settings)
        pretrained = load(settings.model, settings.device)
        settings = _fitted(settings, pretrained)
        assert settings.length is not None
        reading = read(pretrained, documents or standard_library(), settings.length, 1, settings.seed)
        if settings.buckets > settings.length:  # reported for lengths that exist: `read` refuses others
            raise InputError(f"--buckets {settings.buckets} is more than the {settings.length} tokens of a sequence")
        with as_input_error():
            rows = [_row(method, pretrained, settings.length) for method in methods if method != Full()]
            rows += [_adapted(folder, pretrained) for folder in dict.fromkeys(settings.adapters)]
            rows += [_planned(folder, pretrained, settings.length) for folder in dict.fromkeys(settings.plans)]
        check_names((row.label, row.folder) for row in rows)
        return cls(
            settings=settings,
            pretrained=pretrained,
            reading=reading,
            rows=rows,
            items=reading.sequences(pretrained, settings.length, settings.sequences),
        )

    @property
    def layers(self) -> list[int]:
        """The numbers of the attention layers."""
        return [layer.number for layer in hf.find_layers(self.pretrained.model)]

    @property
    def keys(self) -> int:
        """N/B, the keys of the upper bound."""
        assert self.settings.length is not None
        return max(1, self.settings.length // self.settings.buckets)

    def fingerprint(self) -> dict[str, Any]:
        """All that the results depend on."""
        return {
            "model": self.pretrained.identity(),
            "methods": [[row.label, mark_of(row.bounds), *([row.note] if row.note else [])] for row in self.rows],
            "items": self.items,
            "settings": [self.settings.buckets, self.settings.layer, self.settings.head, self.settings.tokens],
            "machine": [machine.versions(), machine.hardware(self.settings.device)],
        }

    def inputs(self, i: int) -> dict[int, LayerInputs]:
        """The inputs of the layers in the i-th sequence, of several calls of a layer the last.

        Raises:
            ValueError: NaN or infinity reaches a layer.
        """
        if self.recording is None or self.recording[0] != i:
            with recorded(self.pretrained.model) as calls:
                self.pretrained.forward([self.items[i]])
            self.calls = Counter(call.number for call in calls)
            self.recording = i, {call.number: call for call in calls}
        return self.recording[1]

    def check_recorded(self) -> None:
        """InputError when a layer has no inputs that methods take; names the layer."""
        with as_input_error():
            inputs = self.inputs(0)
        for layer in hf.find_layers(self.pretrained.model):
            if layer.number not in inputs:
                parts = " and ".join(layer.beside_softmax)
                why = f"has {parts}, which no method but 'full' knows" if parts else "computes nothing for these inputs"
                raise InputError(f"{self.pretrained.name} cannot be inspected: attention layer {layer.label} {why}")

    # ------------------------------------------------------------------ units

    def jobs(self) -> Iterator[Job[Any]]:
        """The units with what makes them, sequence by sequence."""
        for i in range(len(self.items)):
            for number in self.layers:
                yield LAYER.job(i, number, run=partial(self.layer, i, number))
                if self.settings.spectrum:
                    yield SPECTRUM.job(i, number, run=partial(self.spectrum, i, number))
            if i == 0:
                yield MAPS.job(run=self.maps)

    def layer(self, i: int, number: int) -> InspectedLayer:
        """Bounds, and for each method its utilities and the sizes of its buckets, or why it cannot run."""
        inputs = self.inputs(i)[number]
        reasons = {row.label: reason for row in self.rows if (reason := row.refusal(inputs))}
        able = {row.label: row.by_layer[number] for row in self.rows if row.label not in reasons}
        bound, utility = utility_metrics(inputs, able, self.keys)
        sizes = size_metrics(inputs, able)
        metrics = {label: InLayer(utility=utility.get(label), **sizes.get(label, {})) for label in able}
        return InspectedLayer(bound, metrics | {label: InLayer(reason) for label, reason in reasons.items()})

    def spectrum(self, i: int, number: int) -> LayerSpectrum:
        """The spectrum of exact attention's weights."""
        return spectrum_metrics(self.inputs(i)[number], self.curve)

    @property
    def curve(self) -> list[int]:
        """The j at which Y(j) is kept."""
        assert self.settings.length is not None
        return curve_points(self.settings.length)

    def maps(self) -> dict[str, list[list[float]]]:
        """Weights of the head that was asked for, between the first tokens."""
        s = self.settings
        assert s.layer is not None
        inputs, shown = self.inputs(0)[s.layer], slice(s.tokens)
        rows = [InspectRow(EXACT, Full(), {s.layer: Full()}), *self.rows]
        able = {row.label: row.by_layer[s.layer] for row in rows if not row.refusal(inputs)}
        return {label: _map(method, inputs, s.head, shown) for label, method in able.items()}


def utility_metrics(
    inputs: LayerInputs, methods: Mapping[str, Method | BoundMethod], keys: int
) -> tuple[list[float], dict[str, dict[Variant, UtilityMetrics]]]:
    """The upper bound of each head; the utility of the methods that choose keys, with N/B of them and as given."""
    choosing = {label: method for label, method in methods.items() if isinstance(inner(method), ChoosesKeys)}
    asked = {("given", label): method for label, method in choosing.items()}
    asked |= {("n_b", label): lean for label, method in choosing.items() if (lean := at_n_b(method)) is not method}
    bound, utility = utilities(asked, inputs.query, inputs.key, keys=keys, **_options(inputs))
    metrics = {
        key: UtilityMetrics(*(each.mean(0).tolist() for each in (values.utility, values.keys, values.bound)))
        for key, values in utility.items()
    }
    configured = {label: metrics["given", label] for label in choosing}
    return bound.mean(0).tolist(), {
        label: {"n_b": metrics.get(("n_b", label), values), "given": values} for label, values in configured.items()
    }


def size_metrics(inputs: LayerInputs, methods: Mapping[str, Method | BoundMethod]) -> dict[str, dict[str, Any]]:
    """Sizes of the buckets of the methods that hash tokens: queries and keys, for each head."""
    metrics = {}
    for label, method in methods.items():
        if isinstance(inner(method), Hashes):
            sizes = bucket_sizes(method, inputs.query, inputs.key, **_options(inputs))
            metrics[label] = {"queries": sizes.queries[0].tolist(), "keys": sizes.keys[0].tolist()}
    return metrics


def curve_points(length: int) -> list[int]:
    """The j of a curve Y(j): all to 16, then some evenly to the length, with that of the heat map."""
    spaced = (round(length * step / POINTS) for step in range(1, POINTS + 1))
    return sorted({j for j in (*range(1, 17), *spaced, heat_map_index(length)) if 1 <= j <= length})


def spectrum_metrics(inputs: LayerInputs, curve: list[int]) -> LayerSpectrum:
    """For each head of a sequence: Y at each j of `curve`, and how many singular values hold 90 % of their sum."""
    (values,) = singular_values(inputs.query, inputs.key, **_options(inputs))
    shares = cumulative(values)[:, [j - 1 for j in curve]]
    return LayerSpectrum(shares.tolist(), needed(values, 0.9).tolist())


def _options(inputs: LayerInputs) -> dict[str, Any]:
    return {name: inputs.options[name] for name in ("mask", "bias", "scale")}


@torch.inference_mode()
def _map(method: Method | BoundMethod, inputs: LayerInputs, head: int, shown: slice) -> list[list[float]]:
    options = _options(inputs) | {"enable_gqa": inputs.query.shape[1] != inputs.key.shape[1]}
    rows = torch.arange(inputs.query.shape[2], device=inputs.query.device)[shown]
    tensors = inputs.query, inputs.key, inputs.value
    weights = attention_weights(method, *tensors, rows=rows, keys=shown, **options)
    return [[round(weight, 6) for weight in row] for row in weights[0, head].float().tolist()]


# ---------------------------------------------------------------------- what the user gave


def _fitted(settings: InspectSettings, pretrained: Pretrained) -> InspectSettings:
    """The settings with the model's own length and a layer in the middle where none is named."""
    layers = hf.find_layers(pretrained.model)
    length = pretrained.length(settings.length, "--length")
    layer = len(layers) // 2 if settings.layer is None else settings.layer
    if not 0 <= layer < len(layers):
        raise InputError(f"no layer {layer}: {pretrained.name} has layers 0 to {len(layers) - 1}")
    heads = hf.head_counts(layers[layer])[0]
    if not 0 <= settings.head < heads:
        raise InputError(f"no head {settings.head}: layer {layer} of {pretrained.name} has heads 0 to {heads - 1}")
    return replace(settings, length=length, layer=layer, tokens=min(settings.tokens, length))


def _row(method: Method, pretrained: Pretrained, length: int) -> InspectRow:
    """A method as it starts: learned parameters are not fitted to the model."""
    layers = hf.find_layers(pretrained.model)
    if not method.traits.learned:
        return InspectRow(str(method), method, {layer.number: method for layer in layers})
    by_layer = {layer.number: hf.bind(layer, method, length).to(pretrained.device).eval() for layer in layers}
    return InspectRow(f"{method} (not calibrated)", method, by_layer, calibrated=False)


def _adapted(folder: Path, pretrained: Pretrained) -> InspectRow:
    """The methods of an adapter, with the parameters that were fitted to this model."""
    adapter = hf.read_adapter(folder)
    by_layer = adapter.bounds(pretrained.model)
    methods = [bound.method for bound in by_layer.values()]
    various = "" if len(set(methods)) == 1 else " and others"
    label = f"{methods[0]}{various}@{folder.name}"
    history = adapter.record.get("history", [])
    return InspectRow(label, methods[0], by_layer, calibrated=True, history=history, folder=str(folder))


def _planned(folder: Path, pretrained: Pretrained, length: int) -> InspectRow:
    """The row of a plan for inputs of this length, without the layers in which it runs exact attention."""
    planned = load_plan(folder).by_layer(pretrained.model)
    at = {number: at_length(method, length) for number, method in planned.items()}
    by_layer = {
        number: method.to(pretrained.device).eval() if isinstance(method, BoundMethod) else method
        for number, method in at.items()
        if not inner(method).is_exact
    }
    methods = Counter(map(inner, by_layer.values())).most_common(1)
    label = f"plan:{folder.resolve().name}"
    listed = ", ".join(f"{number}: {inner(method)}" for number, method in sorted(at.items()))
    return InspectRow(
        label,
        methods[0][0] if methods else Full(),
        by_layer,
        calibrated=True if any(isinstance(method, BoundMethod) for method in by_layer.values()) else None,
        missing=f"the plan runs exact attention there at {length:,} tokens",
        note=f"{label} is the plan of {folder}, by layer ({listed}).",
        folder=str(folder),
    )
