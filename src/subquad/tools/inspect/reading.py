"""Read the results of an inspection, in which any figure may be absent."""

from collections.abc import Sequence
from typing import NamedTuple

from subquad.tools.inspect.schema import Inspected, InspectReport, LayerMetrics, Variant


class Choice(NamedTuple):
    """Means over heads of what a method chooses in a layer, and over the layers for several."""

    utility: float
    keys: float
    bound: float


def choice(layer: LayerMetrics, variant: Variant) -> Choice | None:
    """The choice of one layer; None if the method chooses no keys there."""
    measured = (layer.utility or {}).get(variant)
    return None if measured is None else Choice(*(mean(getattr(measured, name)) for name in Choice._fields))


def choices(method: Inspected, variant: Variant) -> dict[int, Choice]:
    """The choices by layer."""
    by_layer = {int(number): choice(layer, variant) for number, layer in method.layers.items()}
    return {number: one for number, one in by_layer.items() if one is not None}


def over_layers(layers: Sequence[Choice]) -> Choice | None:
    """The mean of the layers; None where there are none."""
    return Choice(*map(mean, zip(*layers, strict=True))) if layers else None


def bounds(report: InspectReport) -> dict[int, float]:
    """The upper bound at N/B keys by layer, as the mean over heads."""
    return {int(number): mean(heads) for number, heads in report.bounds.items()}


def widens(method: Inspected) -> bool:
    """True if the method as given chooses another number of keys than N/B buckets of one round do."""
    lean, widened = (over_layers(list(choices(method, variant).values())) for variant in ("n_b", "given"))
    return lean is not None and widened is not None and abs(lean.keys - widened.keys) > 0.01 * lean.keys


def hashing(report: InspectReport, layer: str | None = None) -> list[Inspected]:
    """The methods whose bucket sizes are known, in one layer or in any."""
    return [
        method
        for method in report.methods
        if any(metrics.queries for number, metrics in method.layers.items() if layer in (None, number))
    ]


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)
