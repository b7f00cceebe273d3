"""Padding that holds NaN, infinity or numbers with infinite products, which a product with 0 would pass on as NaN."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from subquad.kernels.transforms import shapes_may_follow_data
from subquad.masks import Mask


def cleared(x: Float[Tensor, "B H N D"], valid: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B H N D"]:
    """The vectors, with 0 for padded tokens where these, or their products, may not be finite.

    On a CPU the norm of all vectors tells whether a product may overflow, which costs a fraction of the copy.
    Elsewhere, and under torch.compile and vmap, nothing is read back: padding is always cleared.
    """
    if valid is None:
        return x
    if shapes_may_follow_data(x):
        largest = torch.finfo(torch.promote_types(x.dtype, torch.float32)).max
        if torch.linalg.vector_norm(x.detach()) < largest**0.25:  # so that products of three numbers are finite too
            return x
    return x.masked_fill(~valid[:, None, :, None], 0.0)


def cleared_inputs(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of attention under this mask, each `cleared`."""
    queries, keys = mask.query_padding(query.shape[2]), mask.key_padding(key.shape[2])
    return cleared(query, queries), cleared(key, keys), cleared(value, keys)


def zeroed_halves(query: Tensor, key: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Query and key of tokens that are hashed as one, with 0 for the half that is padding if the other half is not."""
    if not (mask.keys or mask.queries):  # padding is both halves, in no bucket
        return query, key
    queries, keys = mask.query_padding(query.shape[2]), mask.key_padding(key.shape[2])
    query = query if queries is None else query.masked_fill(~queries[:, None, :, None], 0.0)
    return query, key if keys is None else key.masked_fill(~keys[:, None, :, None], 0.0)
