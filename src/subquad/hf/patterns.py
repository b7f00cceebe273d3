"""The pairs that a mask function of transformers lets see each other, read from the function itself.

transformers describes who may attend to whom by small functions of (batch, head, query, key), put together by
`transformers.masking_utils.and_masks` and `transformers.masking_utils.or_masks`. All that subquad understands comes
down to an interval of distances, key minus query:

    causal                          (−∞, 0]
    bidirectional                   (−∞, ∞)
    the last w tokens               (−w, ∞) ∩ (−∞, 0]
    w tokens to each side           [−w, w]
"""

import dis
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MaskFunction = Callable[..., Any]

_INNER = ".<locals>.inner_mask"
_AND, _OR = "and_masks.<locals>.and_mask", "or_masks.<locals>.or_mask"


@dataclass(frozen=True)
class LayerPattern:
    """The distances, key minus query, that are seen: `first` to `last`, both included."""

    first: int | float = -math.inf
    last: int | float = math.inf

    @property
    def causal(self) -> bool:
        """True if no later key is seen."""
        return self.last == 0

    @property
    def window(self) -> int | None:
        """The window of the pattern, as in `Mask.window`; None if distance does not matter."""
        return None if self.first == -math.inf else int(-self.first)

    @property
    def known(self) -> bool:
        """True if this is a pattern that `Mask` has: causal or bidirectional, with or without a window."""
        return self.last in (0, math.inf, -self.first) and not (self.last == math.inf and self.first != -math.inf)

    def __and__(self, other: "LayerPattern") -> "LayerPattern":
        return LayerPattern(max(self.first, other.first), min(self.last, other.last))

    def __or__(self, other: "LayerPattern") -> "LayerPattern | None":
        """The union of two patterns, if it is an interval."""
        if max(self.first, other.first) > min(self.last, other.last) + 1:
            return None
        return LayerPattern(min(self.first, other.first), max(self.last, other.last))


EVERYTHING, CAUSAL = LayerPattern(), LayerPattern(last=0)


def read_pattern(function: MaskFunction | None) -> LayerPattern:
    """The pattern of a mask function; None, which some models give, means all keys.

    Raises:
        ValueError: the function, or a part of it, is not one that is understood; named.
    """
    pattern = EVERYTHING if function is None else _read(function)
    if not pattern.known:
        raise ValueError(
            f"this model lets a query see the keys at distances {pattern.first:g} to {pattern.last:g}, which is "
            "neither causal nor the same to both sides; subquad does not support such a mask"
        )
    return pattern


def _read(function: MaskFunction) -> LayerPattern:
    name, cells = _name(function), _cells(function)
    if name in (_AND, _OR):
        first, *others = (_read(part) for part in cells["mask_functions"])
        for part in others:
            both = first & part if name == _AND else first | part
            if both is None:
                raise _unknown(name)
            first = both
        return first
    if name == "causal_mask_function":
        return CAUSAL
    if name == "bidirectional_mask_function" or _is_always_true(function):
        return EVERYTHING
    if name == "sliding_window_overlay" + _INNER:
        return LayerPattern(first=1 - cells["sliding_window"])
    if name == "sliding_window_bidirectional_overlay" + _INNER:
        return LayerPattern(-cells["sliding_window"], cells["sliding_window"])
    if name == "_bidirectional_window_overlay" + _INNER:  # of Gemma 3 and EmbeddingGemma
        return LayerPattern(1 - cells["sliding_window"], cells["sliding_window"] - 1)
    if name == "packed_sequence_mask_function" + _INNER:  # segments are handed through as numbers
        return EVERYTHING
    if name == "remap_positions_for_packed_sequence" + _INNER:  # the same distances, counted inside each segment
        return _read(cells["mask_function"])
    raise _unknown(name)


def _unknown(name: str) -> ValueError:
    return ValueError(
        f"this model masks attention by {name!r}, which subquad does not support; restore its own attention for that"
    )


def _name(function: MaskFunction) -> str:
    code = getattr(function, "__code__", None)
    return type(function).__name__ if code is None else code.co_qualname


def _cells(function: MaskFunction) -> dict[str, Any]:
    names = function.__code__.co_freevars
    return dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))


def _is_always_true(function: MaskFunction) -> bool:
    """True if this returns True whatever it is given, as the `lambda *args: torch.tensor(True)` of some encoders."""
    code = getattr(function, "__code__", None)
    if code is None or code.co_freevars or any(i.opname.startswith("LOAD_FAST") for i in dis.get_instructions(code)):
        return False
    result = function(0, 0, 0, 0)
    return result is True or (isinstance(result, torch.Tensor) and result.dtype == torch.bool and bool(result.all()))
