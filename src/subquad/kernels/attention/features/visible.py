"""Attention by features under a mask: padding, causality, and queries at an offset among the keys."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.attention.features.op import feature_attention
from subquad.kernels.attention.softmax import merge_partials
from subquad.masks import Mask

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


def attend_features(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M C"],
    value: Float[Tensor, "B G M E"],
    mask: Mask,
    *,
    key_bias: Float[Tensor, "B #G M"] | None = None,
    **maps: Any,
) -> Partial:
    """`feature_attention` to the keys that the mask shows: padding, causal. `maps` are its other arguments."""
    N, M = query.shape[2], key.shape[2]
    valid = mask.key_padding(M)

    def attend(key: Tensor, value: Tensor, bias: Tensor | None, visible: Tensor | None, causal: bool) -> Partial:
        bias = bias if visible is None else hide_keys(bias, visible, key)
        return feature_attention(query, key, value, key_bias=bias, causal=causal, **maps)

    if not mask.is_causal or (mask.aligned and N == M):
        return attend(key, value, key_bias, valid, mask.is_causal)
    # Keys before the first query are seen by all queries; from there on, queries and keys are the same tokens.
    self_position = mask.positions(torch.arange(N, device=query.device)[None])
    first, position = self_position[:, :1], torch.arange(M, device=query.device)
    if N == 1:
        return attend(key, value, key_bias, _both(valid, position <= first), False)
    self_key, self_value = _at(key, self_position), _at(value, self_position)
    self_bias = None if key_bias is None else _at(key_bias.unsqueeze(-1), self_position).squeeze(-1)
    inside = self_position < M
    shown = inside if valid is None else inside & valid.gather(1, self_position.clamp(max=M - 1).expand(len(valid), -1))
    before = attend(key, value, key_bias, _both(valid, position < first), False)
    return merge_partials([before, attend(self_key, self_value, self_bias, shown, True)])


def drop_rows(value: Float[Tensor, "B G M E"], dropout_p: float) -> Float[Tensor, "B G M E"]:
    """Dropout where no weights are formed: rows of values leave the sum over keys, and not its denominator."""
    return value * F.dropout(value.new_ones(*value.shape[:3], 1), dropout_p) if dropout_p > 0 else value


def _both(valid: Bool[Tensor, "B M"] | None, visible: Bool[Tensor, "#B M"]) -> Bool[Tensor, "#B M"]:
    return visible if valid is None else valid & visible


def hide_keys(bias: Tensor | None, visible: Bool[Tensor, "#B M"], key: Tensor) -> Float[Tensor, "B G M"]:
    """The bias of the keys, with −inf where a key is not seen."""
    bias = key.new_zeros(key.shape[0], 1, key.shape[2]) if bias is None else bias
    return bias.masked_fill(~visible.unsqueeze(1), -torch.inf)


def _at(x: Float[Tensor, "B G M D"], positions: Int64[Tensor, "#B N"]) -> Float[Tensor, "B G N D"]:
    """The rows at these positions; past the end, the last one."""
    B, G, M, D = x.shape
    index = positions.clamp(max=M - 1).view(-1, 1, positions.shape[1], 1)
    return x.gather(2, index.expand(B, G, -1, D))
