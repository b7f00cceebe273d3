"""Full attention: exact, through `torch.nn.functional.scaled_dot_product_attention`.

    out_i = Σ_j softmax_j(q_i·k_j / √D + bias_ij) v_j          Vaswani et al. 2017, equation 1

The yardstick of everything here. SDPA runs its flash kernel where the mask is empty, causal or padding alone; windows,
segments, dense masks and biases take a mask over queries and keys, as in any exact attention.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.masks import Mask
from subquad.methods.base import Call, Method, Traits
from subquad.ops.heads import repeat_heads
from subquad.ops.softmax import visible_softmax


def sdpa(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    """Exact attention by the cheapest SDPA call that says the mask. Queries that see no key get 0."""
    mask, bias, gqa = call.mask, call.bias, query.shape[1] != key.shape[1]
    exact = partial(F.scaled_dot_product_attention, scale=call.scale, dropout_p=call.dropout_p, enable_gqa=gqa)
    if mask.only_causal and bias is None:
        return exact(query, key, value, is_causal=True)
    visible = mask.visible(query.shape[2], key.shape[2], query.device)
    if visible is None:
        bias = None if bias is None else bias.to(query.dtype)
        return exact(query, key, value, attn_mask=bias)
    sees_any = visible.any(-1, keepdim=True)
    # A row without a visible key is NaN in some SDPA kernels: let it see all, then make it 0.
    attn_mask = visible | ~sees_any
    if bias is not None:
        attn_mask = bias.to(query.dtype).masked_fill(~attn_mask, -torch.inf)
    out = exact(query, key, value, attn_mask=attn_mask)
    return out.masked_fill(~sees_any, 0.0)


@dataclass(frozen=True)
class Full(Method):
    """Exact attention (SDPA).

    >>> import torch, subquad as sq
    >>> q = k = v = torch.eye(3).view(1, 1, 3, 3)
    >>> sq.attention(q, k, v, method="full", is_causal=True)[0, 0, 0]
    tensor([1., 0., 0.])
    """

    name: ClassVar[str] = "full"
    skips_padding: ClassVar[bool] = True  # which must be finite, as for SDPA
    traits: ClassVar[Traits] = Traits(
        causal="strict",
        cross=True,
        key_padding=True,
        segments=True,
        window=True,
        dense_mask=True,
        bias=True,
        gqa=True,
        dropout="attention weights",
        partial=True,
        order_free=True,
        subquadratic=False,
        yardstick=True,
        exact_limit={},
        complexity="O(N·M·D) time, O(N) memory; O(N·M) memory with a window, segments, a dense mask or a bias",
        source="Vaswani et al. 2017; Dao et al. 2022",
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """Exact attention."""
        return sdpa(query, key, value, call)

    def partial(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Mask | None = None, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention over these keys with its log-sum-exp, (B,H,N,E) and (B,H,N), to be merged with other keys'."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        logits = query @ key.transpose(-1, -2) * scale
        visible = (mask or Mask()).visible(query.shape[2], key.shape[2], query.device)
        hidden = logits if visible is None else logits.masked_fill(~visible, -torch.inf)
        return visible_softmax(logits, visible) @ value, hidden.logsumexp(-1)
