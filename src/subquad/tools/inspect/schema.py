"""The shape of `results.json` of `subquad inspect`, which its tables and plots are made from.

A figure that was not measured is absent or None, never 0.
"""

from typing import Any, Literal, NotRequired, TypedDict

KIND, SCHEMA = "subquad inspect", 1

# How a method is run: with buckets of N/B tokens and one round, or as it is given.
Variant = Literal["n_b", "given"]
VARIANTS: tuple[Variant, ...] = ("n_b", "given")


class InspectedShares(TypedDict):
    """Shares of unbalanced buckets; None where there is no bucket to take the share of."""

    size: float | None
    size_of_filled: float | None
    ratio: float | None
    ratio_of_both: float | None


class UtilityMetrics(TypedDict):
    """Utilities of one layer for each of its heads, as means over the sequences."""

    utility: list[float]
    keys: list[float]  # distinct ones that a query meets
    bound: list[float]  # the most that this number of keys can have


class LayerMetrics(TypedDict):
    """One method in one layer."""

    reason: NotRequired[str]  # why it could not run there; then nothing else is here
    utility: NotRequired[dict[Variant, UtilityMetrics]]
    queries: NotRequired[list[list[list[int]]]]  # in each bucket, for each head, for each sequence
    keys: NotRequired[list[list[list[int]]]]
    imbalance: NotRequired[InspectedShares]


class Inspected(TypedDict):
    """One method."""

    method: str  # as the command line writes it, and what its learned parameters are
    settings: dict[str, Any]  # Method.to_dict()
    calibrated: bool | None  # None: it has no learned parameters
    layers: dict[str, LayerMetrics]
    imbalance: NotRequired[InspectedShares]  # over all layers


class InspectedFit(TypedDict):
    """How the learned parameters of an adapter were fitted."""

    method: str  # as in Inspected
    buckets: int
    history: list[dict[str, Any]]  # {"step": …, "layers": {number: figures}}


class Maps(TypedDict):
    """Attention weights of one head on some tokens of the first sequence."""

    layer: int
    head: int
    tokens: list[str]
    weights: dict[str, list[list[float]]]  # method -> queries × keys


class LayerSpectrum(TypedDict):
    """Singular values of one layer's exact weights, for each of its heads: means over the sequences."""

    curves: list[list[float]]  # Y(j) at each j of Spectrum.at
    needed: list[float]  # how many singular values hold 90 % of their sum


class Spectrum(TypedDict):
    """Y(j) = Σ_{i≤j} σ_i / Σ_i σ_i of softmax(scale·Q Kᵀ)."""

    at: list[int]  # the j of the curves
    index: int  # the one of the heat map: 128, or a quarter of the length
    layers: dict[str, LayerSpectrum]


class InspectReport(TypedDict):
    """All of `results.json`."""

    kind: str  # KIND
    schema: int  # SCHEMA
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
    spectrum: NotRequired[Spectrum]  # where it was asked for
    fits: list[InspectedFit]
    notes: list[str]
