"""What a method can do, how it is asked, how it is fitted: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor, nn

from subquad.masks import Mask


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a method can do, as data. The docs, the refusals and the contract suite are all read from this.

    `exact_limit` is the settings at which the method equals exact attention, as {setting: "N", "M" or a number}, or the
    reason why there are none. `example` is settings that put every part of the method to work at some 50 tokens.
    """

    causal: Literal["strict", "values-only", "no"]
    cross: bool  # N ≠ M, and queries that are not the keys' tokens
    key_padding: bool
    segments: bool
    window: bool = False
    dense_mask: bool = False
    bias: bool = False
    gqa: bool
    dropout: str  # what dropout_p > 0 drops
    partial: bool = False  # offers `partial`: (out, lse)
    stochastic: bool = False  # depends on the seed
    order_free: bool  # permuting the queries (and the keys with them, unless `positional`) permutes the outputs
    subquadratic: bool  # its work grows by less than N·M
    positional: bool = False  # which keys a query meets depends on where they stand
    cached: bool = False  # not `cross`, but steps on a cache: N ≠ M under a mask that says where the queries stand
    relative: bool = False  # the logits hold learned terms of the distance, beside the products
    yardstick: bool = False  # computes all N·M logits: there to compare with, never recommended
    learned: bool = False
    needs_hidden: bool = False
    normalised: bool = True  # each query's weights sum to 1, so that equal values come through as they are
    recurrent: bool = False  # offers `init_state` and `advance`: decoding from a state whose size is fixed
    unit: Literal["none", "keys", "both"] = "none"  # what is brought to length 1: logits grow with the other side alone
    exact_limit: Mapping[str, int | str] | str
    example: Mapping[str, int | float | str] = field(default_factory=dict)
    complexity: str
    source: str


@dataclass(frozen=True, eq=False)
class Call:
    """How attention is asked for, checked: what `Method.__call__` hands to `attend` beside query, key and value."""

    mask: Mask
    bias: Tensor | None
    scale: float
    dropout_p: float
    seed: int
    learned: nn.Module | None = None  # the learned parameters, as `Method.make_learned` made them

    def under(self, mask: Mask) -> Call:
        """The same call under another mask."""
        return replace(self, mask=mask)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How `subquad calibrate` fits a method's learned parameters on a frozen model: Adam on `Method.fit_loss`."""

    metric: Literal["utility", "error"]  # what is watched on held-out text: attention utility, or the outputs' error
    learning_rate: float = 3e-3  # at the start; it falls along a half cosine to a tenth
    steps: int = 400
