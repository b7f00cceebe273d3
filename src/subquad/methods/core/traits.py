"""The capabilities of a method, and how it is fitted: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Family = Literal["exact", "clusters", "buckets", "window", "features", "summary", "mixture"]
FAMILIES: tuple[str, ...] = get_args(Family)  # in the order in which methods are listed


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The features of a method, as data, from which docs, refusals and conformance tests are derived.

    `exact_limit` is the settings at which the method equals exact attention, as {setting: "N", "M" or a number}, or the
    reason why there are none. `example` is settings that put every part of the method to work at some 50 tokens.
    """

    family: Family  # what replaces the N·M weights
    causal: Literal["strict", "values-only", "no"] = "no"
    by_halves: bool = False  # causal by exact blocks and rectangles, inside which queries mix: `methods.core.halves`
    cross: bool = True  # N ≠ M, and queries that are not the keys' tokens
    window: bool = False
    dense_mask: bool = False
    bias: bool = False
    dropout: str = "attention weights"  # what dropout_p > 0 drops
    lse: bool = True  # can return (out, lse), so that it composes with attention to other keys, such as kept tokens
    multiplicity: int | str = 1  # how often each key counts at the exact limit, or the setting that sets it
    stochastic: bool = False  # depends on the seed
    order_free: bool = True  # permuting the queries (and the keys with them, unless `positional`) permutes the outputs
    subquadratic: bool = True  # its work grows by less than N·M
    positional: bool = False  # which keys a query meets depends on positions
    from_start: bool = False  # which keys a query meets depends on how far they are from the item's first token
    by_values: bool = False  # what its choices are made from includes the values: its outputs are not linear in them
    cached: bool = False  # not `cross`, but steps on a cache: N ≠ M under a mask with the position of the queries
    relative: bool = False  # the logits contain learned terms of the distance in addition to the products
    synthetic: bool = False  # some logits are not products of queries and keys; `scale` multiplies all of them
    needs_hidden: bool = False  # reads the layer's input, which layers of sq.nn hand on
    quadratic_baseline: bool = False  # computes all N·M logits: there to compare with, never recommended
    learned: bool = False
    one_for_all_layers: bool = False  # the layers of a model share its learned parameters
    fit: Fit | None = None  # how its learned parameters are fitted to a frozen model, if they can be
    normalised: bool = True  # each query's weights sum to 1, so that equal values come through as they are
    recurrent: bool = False  # offers `init_state` and `advance`: decoding from a state whose size is fixed
    zeroes_padding: bool = False  # `attend` gives 0 for padded queries: else the caller sees to it
    skips_padding: bool = False  # `attend` takes NaN in padding: else the caller clears it
    takes_segments: bool = False  # `attend` reads packed segments: else each comes as a batch item
    unit: Literal["none", "keys", "both"] = "none"  # what is brought to length 1: logits grow with the other side alone
    exact_limit: Mapping[str, int | str] | str
    example: Mapping[str, int | float | str] = field(default_factory=dict)
    complexity: str
    source: str

    @property
    def mixes_queries(self) -> bool:
        """True if the output of a query depends on the other queries if there is no causal mask."""
        return self.by_halves or self.causal == "no"

    @property
    def leaks_in_training(self) -> bool:
        """True if causality is by halves with centroids that include later queries: a loss would see the future."""
        return self.by_halves and self.causal != "strict"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Settings of `subquad calibrate`, which fits learned parameters to a frozen model by `Method.fit_loss`."""

    metric: Literal["utility", "error"]  # what is watched on held-out text: attention utility, or the outputs' error
    learning_rate: float = 3e-3  # at the start; it falls along a half cosine to a tenth
    steps: int = 400
