"""Full attention: exact, through `torch.nn.functional.scaled_dot_product_attention`.

    out_i = Σ_j softmax_j(q_i·k_j / √D + bias_ij) v_j          Vaswani et al. 2017, equation 1

The baseline of everything here. SDPA runs its flash kernel where the mask is empty, causal or padding alone; windows,
segments, dense masks and biases take a mask over queries and keys, as in any exact attention. SDPA does not return the
log-sum-exp: where it is asked for, the logits are computed once more, for some queries at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from subquad.methods.base import Call, Method, Partial, Traits, wide
from subquad.ops.heads import repeat_heads
from subquad.ops.softmax import visible_logsumexp
from subquad.ops.transforms import exact_attention

CHUNK = 2**22  # logits of a head that are in memory at a time


def sdpa(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    """Exact attention by the cheapest SDPA call that expresses the mask. Queries that see no key get 0."""
    mask, bias, gqa = call.mask, call.bias, bool(query.shape[1] != key.shape[1])
    exact = partial(exact_attention, scale=call.scale, dropout_p=call.dropout_p, enable_gqa=gqa)
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


def exact(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
    """Exact attention, with its log-sum-exp where the call wants it."""
    if not call.wants_lse:
        return sdpa(query, key, value, call), None
    parts = [visible_logsumexp(logits, seen) for logits, seen in logits_of(query, key, call)]
    return sdpa(query, key, value, call), torch.cat(parts, dim=2)


def logits_of(query: Tensor, key: Tensor, call: Call) -> Iterator[tuple[Tensor, Tensor | None]]:
    """For a few queries at a time, yield their logits in fp32 or better and the keys that they see (None: all)."""
    N, M = query.shape[2], key.shape[2]
    query, key = wide(query, repeat_heads(key, query.shape[1]))
    visible = call.mask.visible(N, M, query.device)
    # All queries together where they are traced: a number of portions would fix the length.
    step = N if torch.compiler.is_compiling() else max(1, CHUNK // M)
    for start in [0] if torch.compiler.is_compiling() else range(0, N, step):
        rows = slice(start, start + step)
        logits = query[:, :, rows] @ key.transpose(-1, -2) * call.scale
        logits = logits if call.bias is None else logits + call.bias[:, :, rows]
        yield logits, visible if visible is None or visible.shape[2] == 1 else visible[:, :, rows]


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
    takes_segments: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        family="exact",
        causal="strict",
        window=True,
        dense_mask=True,
        bias=True,
        subquadratic=False,
        yardstick=True,
        exact_limit={},
        complexity="O(N·M·D) time, O(N) memory; O(N·M) memory with a window, segments, a dense mask or a bias",
        source="Vaswani et al. 2017; Dao et al. 2022",
    )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Exact attention."""
        return exact(query, key, value, call)
