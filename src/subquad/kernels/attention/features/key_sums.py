"""Attention by features to keys that are there only as sums, which are as large as a few keys.

What some of the keys leave behind is, for each feature r, its weight and the mean of the values that have it:

    λ_r = ln Σ_j e^{y_jr},   μ_r = Σ_j e^{y_jr − λ_r} v_j

These are what a query with the feature r alone reads, so that `feature_attention` itself makes them. To other queries
they are one key for each feature: with the exponent λ_r for r, none for the others, and the value μ_r. Partials over
disjoint sets of keys merge to the whole.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.kernels.attention.features.op import feature_attention

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


def attend_sums(query: Tensor, allowed: list[Float[Tensor, "B G R F"]], **maps: Any) -> Partial:
    """Attention of queries to the keys of which these sums are left."""
    sums = torch.cat(allowed, dim=2)
    means, weights = sums.split([sums.shape[3] - 1, 1], dim=3)
    keys = _one_feature_each(weights.squeeze(-1), allowed[0].shape[2])
    return feature_attention(query.to(means.dtype), keys, means, **maps)


def of_no_keys(like: Float[Tensor, "*row F"]) -> Float[Tensor, "*row F"]:
    """The sums of no keys."""
    none = torch.zeros_like(like)
    none[..., -1] = -torch.inf
    return none


def left_behind(key: Tensor, value: Tensor, of_key: Tensor | None, key_bias: Tensor | None) -> Float[Tensor, "B G R F"]:
    """μ, of width E, and λ, 1 more, of these keys, in fp32 or better; 0 and −∞ where there are none."""
    features = key.shape[3] if of_key is None else of_key.shape[1]
    fine = torch.promote_types(key.dtype, torch.float32)
    alone = _one_feature_each(key.new_zeros(*key.shape[:2], features, dtype=fine), features)
    means, weights = feature_attention(alone, key.to(fine), value.to(fine), of_key=of_key, key_bias=key_bias)
    return torch.cat([means, weights.unsqueeze(-1)], dim=-1)


def _one_feature_each(exponents: Float[Tensor, "B G K"], features: int) -> Float[Tensor, "B G K {features}"]:
    """Exponents of tokens of which each has one feature: 0, 1, …, R − 1, 0, 1, …."""
    number = torch.arange(exponents.shape[2], device=exponents.device) % features
    is_feature = number[:, None] == torch.arange(features, device=exponents.device)
    return torch.where(is_feature, exponents.unsqueeze(-1), -torch.inf)
