"""The shape of `results.json` of `subquad inspect`, which its tables and plots are made from.

A figure that was not measured is None, never 0.
"""

from dataclasses import dataclass
from typing import Any, Literal

KIND, SCHEMA = "subquad inspect", 1

# How a method is run: with buckets of N/B tokens and one round, or as it is given.
Variant = Literal["n_b", "given"]
VARIANTS: tuple[Variant, ...] = ("n_b", "given")


@dataclass(frozen=True)
class InspectedShares:
    """Shares of unbalanced buckets; None where there is no bucket to take the share of."""

    size: float | None
    size_of_filled: float | None
    ratio: float | None
    ratio_of_both: float | None


@dataclass(frozen=True)
class UtilityMetrics:
    """Utilities of one layer for each of its heads, as means over the sequences."""

    utility: list[float]
    keys: list[float]  # distinct ones that a query meets
    bound: list[float]  # the most that this number of keys can have


@dataclass(frozen=True)
class LayerMetrics:
    """One method in one layer."""

    reason: str | None = None  # why it could not run there; then nothing else is here
    utility: dict[Variant, UtilityMetrics] | None = None
    queries: list[list[list[int]]] | None = None  # in each bucket, for each head, for each sequence
    keys: list[list[list[int]]] | None = None
    imbalance: InspectedShares | None = None


@dataclass(frozen=True)
class Inspected:
    """One method."""

    method: str  # as the command line writes it, and what its learned parameters are
    settings: dict[str, Any]  # Method.to_dict()
    calibrated: bool | None  # None: it has no learned parameters
    layers: dict[str, LayerMetrics]
    imbalance: InspectedShares | None = None  # over all layers


@dataclass(frozen=True)
class InspectedFit:
    """The record of fitting an adapter's learned parameters."""

    method: str  # as in Inspected
    buckets: int
    history: list[dict[str, Any]]  # {"step": …, "layers": {number: figures}}


@dataclass(frozen=True)
class Maps:
    """Attention weights of one head on some tokens of the first sequence."""

    layer: int
    head: int
    tokens: list[str]
    weights: dict[str, list[list[float]]]  # method -> queries × keys


@dataclass(frozen=True)
class LayerSpectrum:
    """Singular values of one layer's exact weights, for each of its heads: means over the sequences."""

    curves: list[list[float]]  # Y(j) at each j of Spectrum.at
    needed: list[float]  # how many singular values hold 90 % of their sum


@dataclass(frozen=True)
class Spectrum:
    """Y(j) = Σ_{i≤j} σ_i / Σ_i σ_i of softmax(scale·Q Kᵀ)."""

    at: list[int]  # the j of the curves
    index: int  # the one of the heat map: 128, or a quarter of the length
    layers: dict[str, LayerSpectrum]


@dataclass(frozen=True, kw_only=True)
class InspectReport:
    """All of `results.json`."""

    kind: str = KIND
    schema: int = SCHEMA
    created: str  # ISO 8601, UTC
    command: str
    versions: dict[str, str]
    hardware: dict[str, str]
    settings: dict[str, Any]  # buckets, length, keys, sequences, layer, head, tokens, seed
    model: dict[str, Any]
    text: dict[str, Any]
    bounds: dict[str, list[float]]  # layer -> for each head the upper bound at `keys` keys
    methods: list[Inspected]
    maps: Maps
    fits: list[InspectedFit]
    notes: list[str]
    spectrum: Spectrum | None = None  # where it was asked for
    asked: dict[str, Any] | None = None  # the settings that the command was given
