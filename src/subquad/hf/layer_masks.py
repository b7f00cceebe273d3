"""A layer's reading of the mask from transformers: the pairs that see each other, and the queries that are real."""

from torch import Tensor

from subquad.hf.layers import Attached
from subquad.hf.mask_encoding import DecodedMask, decode
from subquad.masks import Mask


def decoded(layer: Attached, mask: Tensor | None, query: Tensor, keys: int, causal: bool) -> DecodedMask:
    """The mask that a layer was given for these queries and a number of keys."""
    return decode(mask, query.shape[2], keys, causal=causal, label=layer.label, batch=query.shape[0])


def mask_of(layer: Attached, N: int, M: int, encoded: DecodedMask) -> tuple[Mask, Tensor | None]:
    """The mask without the padding of keys, and the queries that are real (None: all, or not known)."""
    if layer.cross and not encoded.read:
        return Mask(), None
    # Also for a single query, which sees every filled slot: a causal form can be another than the plain one.
    mask = Mask.causal(offset=encoded.offset) if encoded.causal else Mask(offset=max(M - N, 0))
    if encoded.segments is not None:
        mask = mask & Mask.segments(encoded.segments)
    window = encoded.window if encoded.read else layer.window
    if window is not None:
        mask = mask & Mask.window(window)
    return mask, None if layer.cross else encoded.queries(N)


def mask_of_new(layer: Attached, new: int, encoded: DecodedMask) -> Mask | None:
    """The padding of the tokens that a state has not seen, which are the last of all."""
    if encoded.segments is not None:
        raise ValueError(f"layer {layer.label}: packed sequences have one state each; generate from a padded batch")
    return None if encoded.valid is None else Mask.padding(encoded.valid[:, -new:])
