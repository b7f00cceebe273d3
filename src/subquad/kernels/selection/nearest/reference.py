"""The nearest cluster of each query, in plain PyTorch."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.precision import upcast
from subquad.kernels.selection.clusters.reference import logit_factor
from subquad.kernels.tokens.heads import repeat_heads


def nearest_clusters(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    means: Float[Tensor, "B H C D"],
    sizes: Int64[Tensor, "B H C"],
    query_valid: Bool[Tensor, "B N"] | None,
    key_valid: Bool[Tensor, "B M"] | None,
) -> Int64[Tensor, "B H N"]:
    """The cluster of other queries to whose mean each query is nearest, in the space "logits" of `query_clusters`.

        argmin_c ‖(q − q̄_c) L‖,   L Lᵀ = covariance of the item's keys

    `sizes` is the number of members of each cluster; an empty one is never the nearest. The label is C for padding, and
    if no cluster has members. Nothing is differentiated. Backends agree up to rounding.
    """
    C = means.shape[2]
    query, means = upcast(query.detach(), means.detach())
    present = sizes > 0
    middle = means.masked_fill(~present[..., None], 0.0).sum(2, keepdim=True)
    middle = middle / present.sum(2)[..., None, None].clamp(min=1)
    apart = (means - middle).masked_fill(~present[..., None], 0.0)
    largest = apart.abs().amax((2, 3), keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    factor = repeat_heads(logit_factor(key, key_valid), query.shape[1]).to(query.dtype)
    mapped, of_means = (query - middle) / largest @ factor, apart / largest @ factor
    halves = (of_means.square().sum(-1) / 2).masked_fill(~present, torch.inf)
    labels = (halves[:, :, None] - mapped @ of_means.mT).argmin(-1)
    labels = torch.where(present.any(2, keepdim=True), labels, C)
    return labels if query_valid is None else torch.where(query_valid[:, None], labels, C)
