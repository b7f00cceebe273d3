"""Methods whose queries meet keys by position, independent of content."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from jaxtyping import Int64
from torch import Tensor

from subquad.kernels.selection.pattern_positions import Item
from subquad.methods.core.bucketed import Bucketed
from subquad.methods.core.method import Traits

SETS = "merged", "heads", "near", "far"  # near and distant keys: in one softmax, by heads, or one kind alone


class Pattern(Bucketed):
    """A method that lists real tokens alone, each key once for a query, in self-attention and steps on a cache."""

    shared_traits: ClassVar[Traits] = Traits(
        family="window",
        causal="strict",
        cross=False,
        cached=True,
        window=True,
        order_free=False,
        positional=True,
        zeroes_padding=True,  # it is in no bucket
        skips_padding=True,
        exact_limit={"window": "N"},
        example={"window": 4},
        complexity="O(N·W·D) time, O(N·(W + D)) memory with a window of W",
        source="Child et al. 2019 and Beltagy et al. 2020",
    )

    def globally_visible(self, item: Item, causal: bool) -> Int64[Tensor, "#B S"] | None:
        """The places of each item's tokens that all queries see, and that see all keys unless the mask is causal.

        None if the method has none; places outside of an item mean none.
        """
        return None


def with_sets(traits: Traits, sets: str, *, far: Mapping[str, int | str], heads: str) -> Traits:
    """The traits of near and distant keys with one of `SETS`, from those where they are merged.

    Args:
        traits: those with sets="merged", which take quadratic time in the end.
        sets: the one of `SETS`.
        far: the exact limit of distant keys alone.
        heads: the reason why there is no exact limit if each half of the heads sees one kind.
    """
    if sets == "near":
        return replace(traits, subquadratic=True)
    return traits if sets == "merged" else replace(traits, exact_limit=far if sets == "far" else heads)
