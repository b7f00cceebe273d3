"""Nested tensors in torch's `nn.MultiheadAttention` while the fused kernels, which alone take them, are off."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.tokens.nested_padding import pad

Forward = Callable[..., tuple[Tensor, Tensor | None]]


def taking_nested(torchs: Forward) -> Forward:
    """torch's `nn.MultiheadAttention.forward`, which runs padded where its inputs are nested.

    Outputs are nested as the inputs are; weights are those of torch's fused kernel, 0 in the rows of padding. Nested
    inputs that the fused kernel does not take either (cross-attention, masks, tokens first) raise torch's own error.
    """

    @wraps(torchs)
    def forward(
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        options = {"average_attn_weights": average_attn_weights, "is_causal": is_causal, "need_weights": need_weights}
        masked = key_padding_mask is not None or attn_mask is not None
        alike = query is key and key is value and layer.batch_first
        if torch.compiler.is_compiling() or not query.is_nested or masked or not alike:
            masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            return torchs(layer, query, key, value, **masks, **options)
        padded = pad(query)
        x, longest = padded.values, padded.values.shape[1]
        padding = torch.arange(longest, device=x.device) >= padded.lengths[:, None]
        out, weights = torchs(layer, x, x, x, key_padding_mask=padding, **options)
        if weights is not None:  # (B,N,M), or (B,H,N,M)
            rows = padding if average_attn_weights else padding[:, None]
            weights = weights.masked_fill(rows[..., None], 0.0)
        return padded.nested_like_it(out), weights

    return forward
