"""The meaning of an `attn_mask` of `scaled_dot_product_attention`, from its shape if possible, else from its values.

    allowed[b, h, i, j] = query_real[b, i] and real[b, j] and first ≤ j − i ≤ last

Which queries and keys are real, and at which distances, key minus query, these are seen. Nothing is taken for such a
pattern before every element was compared with it; a mask over keys alone, (B,1,1,M) or expanded from that, is no larger
than (B,M).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from subquad.core.readable import can_be_read

HIDDEN = -1e4  # a float mask of this or less hides: e^HIDDEN is 0 in every dtype


class IsBias(ValueError):
    """A float mask that is not a mask, but is added to the logits."""


class IsNoPattern(ValueError):
    """A mask whose numbers are those of a mask, but follow no pattern that is known."""


@dataclass(frozen=True, eq=False)
class Reading:
    """A mask as real keys, bool (b,M) with b the mask's own batch, and real queries, bool (b,N); None: all. And an
    interval of distances.
    """

    valid: Tensor | None = None
    valid_queries: Tensor | None = None
    first: int | float = -math.inf
    last: int | float = math.inf


def read_mask(attn_mask: Tensor) -> Reading:
    """Read a mask that broadcasts to (B,H,N,M), bool with True = may attend, or floats that are added to the logits.

    Raises:
        TypeError: it is not a tensor, or neither bool nor floats.
        ValueError: it is not a pattern of this kind, or its numbers would have to be read and cannot be.
    """
    allowed = _one_head(_as_allowed(_compact(attn_mask)))
    if allowed.shape[1] == 1:
        return Reading(_unless_all(allowed[:, 0]))
    _require_readable(allowed)
    valid = allowed.any(1)
    if _equal(allowed, valid, -math.inf, math.inf):
        return Reading(_unless_all(valid))
    if allowed.shape[2] == 1:
        raise ValueError(
            f"this attn_mask of shape {tuple(attn_mask.shape)} has one column, which may represent all keys; expand it "
            "to (…, N, M)"
        )
    first, last = _distances(allowed)
    width = max(last, -first)
    causal, windows, queries = (-math.inf, last), [(first, last), (-width, width)], allowed.any(2)
    padding_of_keys = [(interval, None) for interval in (causal, *windows)]
    padding_of_both = [(interval, queries) for interval in ((-math.inf, math.inf), causal, *windows)]
    # One real token of an item is both a window of 0 and padding of both sides, which more methods support.
    patterns = [padding_of_keys[0], padding_of_both[0], *padding_of_keys[1:], *padding_of_both[1:]]
    for (low, high), valid_queries in patterns:
        known = high == math.inf or _is_known(low, high, *allowed.shape[1:])
        if known and _equal(allowed, valid, low, high, valid_queries):
            beyond = False if valid_queries is not None else _beyond(low, high, allowed)
            return Reading(_unless_all(valid | beyond), valid_queries, low, high)
    raise IsNoPattern(
        f"this attn_mask of shape {tuple(attn_mask.shape)} is not padding, causal, a window, or these together; give "
        "Mask.dense(…) to a method that supports it, or use method='full'"
    )


def read_segments(attn_mask: Tensor) -> tuple[Tensor, bool] | None:
    """Read a block-diagonal mask: the segment of each token, int (b,N), negative = padding, and whether it is causal.

    None for a mask that has another pattern. What it may be, and the errors, are as in `read_mask`.
    """
    allowed = _one_head(_as_allowed(_compact(attn_mask)))
    _require_readable(allowed)
    if allowed.shape[1] != allowed.shape[2]:
        return None
    starts = allowed.to(torch.uint8).argmax(-1)  # the first key that a query sees is the first of its segment
    ids = torch.where(allowed.any(-1), starts, -1)
    if not torch.equal(ids.where(ids >= 0, 0), ids.cummax(1).values.where(ids >= 0, 0)):  # a segment in several pieces
        return None
    blocks = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None]
    if torch.equal(allowed, blocks):
        return ids, False
    return (ids, True) if torch.equal(allowed, blocks.tril()) else None


def _compact(attn_mask: Tensor) -> Tensor:
    """The mask as (b,h,n,M), where an axis that only repeats what it holds has length 1."""
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"`attn_mask` is a {type(attn_mask).__name__}, but it must be a tensor, bool or floating")
    if not 2 <= attn_mask.ndim <= 4:
        raise ValueError(f"`attn_mask` is {tuple(attn_mask.shape)}, but it must broadcast to (B, H, N, M)")
    compact = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if 0 in compact.shape:
        raise ValueError(f"`attn_mask` is empty: {tuple(attn_mask.shape)}")
    for axis in (0, 1, 2):
        if compact.stride(axis) == 0:
            compact = compact.narrow(axis, 0, 1)
    return compact


def _as_allowed(mask: Tensor) -> Tensor:
    """True = may attend. Of floats, 0 is seen and what is at most `HIDDEN` is not."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"`attn_mask` is {mask.dtype}, but SDPA accepts bool, or floats to add to the logits")
    if mask.requires_grad and torch.is_grad_enabled():
        raise IsBias(
            "this float attn_mask requires a gradient, so it is a bias whatever its numbers are; give it as bias= to a "
            "method whose trait `bias` is true"
        )
    _require_readable(mask)
    zero, hidden = mask == 0, mask <= HIDDEN
    if not bool((zero | hidden).all()):
        raise IsBias(
            f"this float attn_mask contains other numbers than 0 and −inf (or {HIDDEN:g} and less), so it is a bias; "
            "give it as bias= to a method whose trait `bias` is true"
        )
    # A row of equal finite numbers hides nothing: softmax does not see what is added to all. But a token that is also
    # hidden from all queries is padding, whose output nobody reads.
    blind = ~(zero.any(-1) | (mask == -math.inf).all(-1))
    is_padding = 1 < zero.shape[2] == zero.shape[3] and not bool((blind & zero.any(2)).any())
    if not is_padding and bool(blind.any()):
        raise ValueError(
            "this float attn_mask hides all keys of a query with finite numbers, which softmax then attends to; use "
            "bool or −inf"
        )
    return zero


def _one_head(allowed: Tensor) -> Bool[Tensor, "b n M"]:
    """The mask of all heads; ValueError where they differ."""
    if allowed.shape[1] > 1:
        _require_readable(allowed)
        if not bool((allowed == allowed[:, :1]).all()):
            raise ValueError("this attn_mask differs between heads, which no sq.Mask but Mask.dense(…) does")
    return allowed[:, 0]


def _distances(allowed: Bool[Tensor, "b n M"]) -> tuple[int, int]:
    """The least and the greatest distance, key minus query, of what is seen; something is."""
    bits = allowed.to(torch.uint8)
    query = torch.arange(allowed.shape[1], device=allowed.device)
    some = allowed.any(-1)
    first = bits.argmax(-1) - query
    last = allowed.shape[2] - 1 - bits.flip(-1).argmax(-1) - query
    return int(first[some].min()), int(last[some].max())


def _is_known(first: int | float, last: int | float, N: int, M: int) -> bool:
    """True if `Mask` has this interval: causal from the start or to the end, or a window to both sides."""
    return (last >= 0 and last in (0, M - N)) or (N == M and first == -last)


def _equal(
    allowed: Bool[Tensor, "b n M"],
    valid: Bool[Tensor, "b M"],
    first: int | float,
    last: int | float,
    valid_queries: Bool[Tensor, "b n"] | None = None,
) -> bool:
    """True if the mask is these keys within these distances, for these queries (None: all), and nothing else."""
    N, M = allowed.shape[1:]
    first, last = max(first, -N), min(last, M)
    query, key = torch.arange(N, device=allowed.device)[:, None], torch.arange(M, device=allowed.device)
    within = (key >= query + first) & (key <= query + last)
    within = within if valid_queries is None else within & valid_queries[:, :, None]
    return torch.equal(allowed, valid[:, None] & within)


def _beyond(first: int | float, last: int | float, allowed: Bool[Tensor, "b n M"]) -> Bool[Tensor, " M"]:
    """The keys at these distances of no query, of which it does not matter whether they are real."""
    N, M = allowed.shape[1:]
    key = torch.arange(M, device=allowed.device)
    return (key > N - 1 + last) | (key < first)


def _unless_all(valid: Bool[Tensor, "b M"]) -> Tensor | None:
    """None where every key is real, as far as that can be seen."""
    return None if can_be_read(valid) and bool(valid.all()) else valid


def _require_readable(mask: Tensor) -> None:
    if not can_be_read(mask):
        raise ValueError(
            f"an attn_mask of shape {tuple(mask.shape)} and {mask.dtype} has its pattern in its numbers, which cannot "
            "be read here (while compiling, under vmap or on the meta device); give is_causal=True or a bool "
            "(B, 1, 1, M), or a sq.Mask"
        )
