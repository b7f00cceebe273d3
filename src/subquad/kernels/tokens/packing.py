"""Packed sequences: take segments apart into a padded batch, and put them together again."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from subquad.core.readable import check_readable
from subquad.masks import Mask


def take_apart(
    packed: Sequence[Float[Tensor, "B _ N _"]], mask: Mask
) -> tuple[list[Float[Tensor, "S _ longest _"]], Mask, Callable[[Tensor], Tensor]]:
    """Packed tensors as a batch of one segment each, their mask, and the way back, which fills the rest with 0.

    The number of segments and the longest one are read from the ids, so this waits for the device once. A segment is
    all the positions of one batch item with one id, in order, be they adjacent or not. If there is none, the batch
    is one item without real tokens.

    Raises:
        ValueError: the mask has a window or an offset, and other tokens are between those of one segment.
    """
    ids = _joint_ids(mask)
    B, N = ids.shape
    inside = ids >= 0
    item = torch.arange(B, device=ids.device)[:, None].expand(B, N)
    pairs = torch.stack([item[inside], ids[inside]], dim=1)
    items, segment, lengths = pairs.unique(dim=0, return_inverse=True, return_counts=True)
    _check_adjacent(mask, ids, len(lengths))
    items, lengths = (items[:, 0], lengths) if len(lengths) else (item[:1, 0], lengths.new_zeros(1))
    slot = (segment, _rank_within(segment, lengths))

    def unpack(x: Tensor) -> Tensor:
        """(B,N,…) to (segments, longest, …)."""
        parts = x.new_zeros(len(lengths), max(1, int(lengths.max())), *x.shape[2:])
        return parts.index_put(slot, x[inside])

    def together(parts: Tensor) -> Tensor:
        """(segments,·,longest,·) to (B,·,N,·)."""
        out = parts.transpose(1, 2)
        whole = out.new_zeros(B, N, *out.shape[2:])
        return whole.index_put(tuple(inside.nonzero().T), out[slot]).transpose(1, 2)

    # Order within a segment is order in the sequence.
    offset = mask.offset[items] if isinstance(mask.offset, Tensor) and mask.offset.numel() > 1 else mask.offset
    inner = Mask.padding(lengths) & Mask(is_causal=mask.is_causal, offset=offset, span=mask.span)
    for side, valid in (("keys", mask.key_padding(N)), ("queries", mask.query_padding(N))):
        inner = inner if valid is None else inner & Mask.padding(**{side: unpack(valid)})
    return [unpack(x.transpose(1, 2)).transpose(1, 2) for x in packed], inner, together


def check_adjacent(mask: Mask) -> None:
    """Raise ValueError where `take_apart` does: a window or an offset, and other tokens are inside a segment."""
    if mask.ids and not (mask.span is None and mask.aligned):
        ids = _joint_ids(mask)
        item = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        _check_adjacent(mask, ids, len(torch.stack([item[ids >= 0], ids[ids >= 0]], dim=1).unique(dim=0)))


def _check_adjacent(mask: Mask, ids: Int[Tensor, "B N"], segments: int) -> None:
    if (mask.span is None and mask.aligned) or _runs(ids) == segments:
        return
    what, size = "window", mask.span
    if mask.span is None:
        what, size = "offset", int(mask.offset.max()) if isinstance(mask.offset, Tensor) else mask.offset
    if what == "window" or size:
        raise ValueError(
            f"the mask's {what} of {size} counts all tokens, but inside a segment only its own are counted; that "
            f"differs here, because other tokens are between those of one segment; use adjacent ones, or no {what}"
        )


def _runs(ids: Int[Tensor, "B N"]) -> int:
    """The number of times that a segment begins, or continues after other tokens."""
    before = F.pad(ids, (1, 0), value=-1)[:, :-1]
    return int(((ids >= 0) & (ids != before)).sum())


def _rank_within(segment: Int[Tensor, "T"], lengths: Int[Tensor, "S"]) -> Int[Tensor, "T"]:
    """The number of each token within its segment."""
    order = segment.argsort(stable=True)
    first = lengths.cumsum(0) - lengths
    ranks = torch.arange(len(segment), device=segment.device) - first[segment[order]]
    return torch.empty_like(segment).scatter(0, order, ranks)


def _joint_ids(mask: Mask) -> Int[Tensor, "B N"]:
    """One id a token: equal where all of the mask's segmentations agree, −1 where one of them is negative."""
    for ids in mask.ids:
        check_readable(ids, "segment ids", "give ids that the transform does not batch, or padding instead of segments")
    joint = mask.ids[0].long()
    for ids in mask.ids[1:]:
        # By their ranks, whose products are small: those of the ids may overflow.
        (_, first), (_, second) = (x.unique(return_inverse=True) for x in (joint, ids))
        joint = torch.where((joint >= 0) & (ids >= 0), first * (second.max() + 1) + second, -1)
    return joint
