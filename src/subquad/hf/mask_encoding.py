"""The mask that transformers carries from its mask function to each layer's attention: one encoding, one decoding.

transformers makes a mask once for each forward pass and hands it through the model's own code. Ours is a plain tensor
of shape (B,1,1,M), never N×M: four axes, because transformers leaves such a mask alone where it prepares masks again.
The dtype encodes the pattern, because it is known without reading a tensor, also while compiling:

    bool    bidirectional     True = a real key
    int8    causal            1 = a real key, 0 = padding
    int16   causal            the same for a static cache, where −1 is a slot that is not filled yet
    int32   causal, packed    the segment of each token, 0 = padding
    uint32  packed            the same, bidirectional: encoders that mask as decoders do, such as EmbeddingGemma

A last axis of size 0 means that no key is hidden. Some models make (B,1,1,M) padding masks of their own, bool or
additive; they are read in the same way. A model's own mask over queries and keys, (B,H,N,M), is compared with what
`Mask` can represent, element by element and in every call: N×M comparisons, for N×M numbers that the model has written.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from subquad.core.readable import can_be_read
from subquad.kernels.transforms import transform
from subquad.masks.sdpa import IsBias, IsNoPattern, read_mask, read_segments

ALMOST_NOTHING = -1e4  # additive masks hide a key by at least so much


@dataclass(frozen=True)
class DecodedMask:
    """A decoded mask. `offset` is the position of the first query among the keys."""

    causal: bool
    valid: Tensor | None = None  # bool (B,M), None: all keys are
    segments: Tensor | None = None  # int (B,M), negative = padding
    offset: int | Tensor = 0
    window: int | None = None  # as in `Mask.window`, where the model's own mask has one
    read: bool = False  # from a model's own mask over queries and keys, and nothing else hides a key

    def queries(self, N: int) -> Tensor | None:
        """The real ones of the N queries, which are the last keys, or the keys before unfilled slots."""
        if self.valid is None:
            return None
        if isinstance(self.offset, Tensor):
            return self.valid.index_select(1, self.offset + torch.arange(N, device=self.valid.device))
        return self.valid[:, self.valid.shape[1] - N :]


def encode(
    *,
    causal: bool,
    valid: Tensor | None,
    filled: Tensor | None,
    segments: Tensor | None,
    batch: int,
    device: torch.device | None = None,
) -> Tensor:
    """The tensor to pass on: `valid` and `segments` are (B,M), `filled` is (M), None if there is none.

    It is on the device of these, and without any on `device`.
    """
    device = next((x.device for x in (valid, filled, segments) if x is not None), device)
    if filled is not None:
        marks = torch.ones(1, len(filled), dtype=torch.int16, device=device) if valid is None else valid.to(torch.int16)
        hidden = torch.where(filled, marks, -1).to(torch.int16)
    elif segments is not None:
        hidden = (segments if valid is None else segments * valid).to(torch.int32 if causal else torch.uint32)
    elif valid is None:
        return torch.empty(1, 1, 1, 0, dtype=torch.int8 if causal else torch.bool, device=device)
    else:
        hidden = valid.to(torch.int8) if causal else valid
    return hidden.expand(batch, -1)[:, None, None, :]


def filled_slots(mask: Tensor | None) -> int | None:
    """The number of filled slots of a static cache, which come first; None if all are, or if it cannot be read.

    On a GPU it is not read, because the GPU would have to finish its work first.
    """
    if mask is None or mask.dtype != torch.int16 or mask.ndim != 4 or not mask.is_cpu:
        return None
    if torch.compiler.is_compiling() or transform() is not None or not can_be_read(mask):
        return None
    filled = int((mask[0, 0, 0] >= 0).sum())
    return None if filled == mask.shape[3] else filled


def of_filled(mask: Tensor, filled: int) -> Tensor:
    """The mask without the slots of a static cache that are not filled: that of a cache without such slots."""
    valid = mask[..., :filled].to(torch.int8)
    return torch.empty(1, 1, 1, 0, dtype=torch.int8, device=mask.device) if bool(valid.all()) else valid


def decode(mask: Tensor | None, N: int, M: int, *, causal: bool, label: str, batch: int | None = None) -> DecodedMask:
    """Decode the mask that a layer's attention was given; `causal` applies if it was given no mask.

    `batch` is the number of items, for a mask that is the same for all of them.

    Raises:
        ValueError: `Mask` cannot represent the mask, or its length differs from that of the keys or queries.
    """
    if mask is None:
        return DecodedMask(causal, offset=M - N if causal else 0)
    if mask.ndim == 4 and tuple(mask.shape[1:]) != (1, 1, mask.shape[3]):
        return _decode_dense(mask, N, M, label, batch)
    if mask.ndim != 4:
        raise ValueError(
            f"layer {label} was given an attention mask of shape {tuple(mask.shape)}; subquad accepts 2-D padding "
            "masks (batch, tokens), of which it makes (batch, 1, 1, keys), and 4-D masks (batch, 1, queries, keys)"
        )
    ours = mask.dtype in (torch.int8, torch.int16, torch.int32)
    if mask.shape[-1] == 0:
        return DecodedMask(ours, offset=M - N if ours else 0)
    if mask.shape[-1] != M:
        raise ValueError(f"layer {label}: the attention mask has {mask.shape[-1]} positions, but there are {M} keys")
    flat = mask[:, 0, 0] if batch is None else mask[:, 0, 0].expand(batch, M)
    if mask.dtype == torch.bool:
        return DecodedMask(False, flat)
    if mask.is_floating_point():
        return DecodedMask(False, _valid_of_additive(flat, label))
    if mask.dtype in (torch.int32, torch.uint32):
        return DecodedMask(mask.dtype == torch.int32, segments=flat.int() - 1)
    if mask.dtype == torch.int16:
        return DecodedMask(True, flat > 0, offset=(flat[0] >= 0).sum() - N)
    if mask.dtype != torch.int8:
        raise ValueError(f"layer {label} was given a mask of dtype {mask.dtype}, which subquad does not support")
    return DecodedMask(True, flat > 0, offset=M - N)


def _decode_dense(mask: Tensor, N: int, M: int, label: str, batch: int | None) -> DecodedMask:
    """Decode a mask over queries and keys that the model's own code made, or its user."""
    what = f"layer {label} was given an attention mask of shape {tuple(mask.shape)}"
    remedy = "pass a 2-D padding mask (batch, tokens), or give the model its own attention back: sq.hf.restore(model)"
    if tuple(mask.shape[2:]) != (N, M):
        raise ValueError(f"{what}, but it has {N} queries and {M} keys")
    if not can_be_read(mask):
        raise ValueError(
            f"{what}, whose numbers cannot be read while compiling; run without torch.compile, or {remedy}"
        )
    try:
        decoded = _read_dense(_without_rows_of_padding(mask), N, M)
    except IsBias as error:
        raise ValueError(f"{what}, which is a bias on the logits and not a mask (it contains other numbers than 0 and "
                         f"−inf, or needs a gradient); {remedy}") from error  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}, which cannot be read ({str(error).partition(';')[0]}); {remedy}") from error
    if decoded is None:
        raise ValueError(
            f"{what} and {mask.dtype}, which is not padding of the keys, causality, segments or a window; {remedy}"
        )
    valid, segments = (
        x if x is None or batch is None else x.expand(batch, M) for x in (decoded.valid, decoded.segments)
    )
    return replace(decoded, valid=valid, segments=segments)


def _read_dense(mask: Tensor, N: int, M: int) -> DecodedMask | None:
    """The pattern of the mask; None if `Mask` has no such pattern."""
    try:
        pattern = read_mask(mask)
    except IsNoPattern:
        pattern = None
    if (
        pattern is None or pattern.valid_queries is not None or pattern.first == pattern.last
    ):  # each token sees itself alone: a segment of its own
        packed = read_segments(mask)
        return None if packed is None else DecodedMask(packed[1], segments=packed[0], read=True)
    if pattern.last == math.inf:
        return DecodedMask(False, pattern.valid, read=True)
    if N == M and pattern.first == -pattern.last:
        return DecodedMask(False, pattern.valid, window=int(pattern.last), read=True)
    if pattern.last != M - N:  # the queries are not at the end of the keys
        return None
    window = None if pattern.first == -math.inf else int(pattern.last - pattern.first)
    return DecodedMask(True, pattern.valid, offset=M - N, window=window, read=True)


def _without_rows_of_padding(mask: Tensor) -> Tensor:
    """The mask as bool, where padded tokens see no key in an additive one, as those before the first token of a causal
    item. Softmax would give them the mean of all values; no token sees them, and here they are given 0.
    """
    if not mask.is_floating_point() or mask.shape[2] != mask.shape[3]:
        return mask
    visible = mask > ALMOST_NOTHING
    blind = ~visible.any(-1)
    only_a_mask = bool(((mask == 0) | ~visible).all()) and not (mask.requires_grad and torch.is_grad_enabled())
    return visible if only_a_mask and bool(blind.any()) and not bool((blind & visible.any(-2)).any()) else mask


def _valid_of_additive(bias: Tensor, label: str) -> Tensor:
    valid = bias > ALMOST_NOTHING
    if not torch.compiler.is_compiling() and bool((valid & (bias != 0)).any()):
        raise ValueError(
            f"layer {label} was given an additive attention mask with values other than 0 and less than "
            f"{ALMOST_NOTHING:g}; subquad accepts padding only"
        )
    return valid
