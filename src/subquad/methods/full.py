"""Full attention: exact, through `torch.nn.functional.scaled_dot_product_attention`.

    out_i = Σ_j softmax_j(a_ij + bias_ij) v_j
    a_ij  = q_i·k_j / √D                                        positions="none": Vaswani et al. 2017, equation 1
    a_ij  = ((q_i + u)·k_j + (q_i + v)·W_R r_{i−j}) / √D         positions="relative": Dai et al. 2019, section 3.3

The baseline of everything here. SDPA runs its flash kernel where the mask is empty, causal or padding alone; windows,
segments, dense masks and biases take a mask over queries and keys, as in any exact attention. SDPA does not return the
log-sum-exp. On CPUs the kernel below it does (`kernels.attention.blockwise.partial`); elsewhere, with a bias or with
dropout, the logits are computed once more, for some queries at a time.

Relative positions are those of "local", over all distances; their terms are handed to SDPA as a bias.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from subquad.kernels.attention.blockwise.partial import fused_partial, is_fused
from subquad.kernels.attention.relative_positions import NOT_EXACT, RelativePositions, every_ahead
from subquad.kernels.attention.softmax import visible_logsumexp
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.transforms import exact_attention
from subquad.methods.core.method import Call, Method, Partial, Traits, choice, upcast

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
    if call.bias is None and not call.dropout_p and is_fused(query):
        causal = bool(call.mask.only_causal)
        allowed = None if causal else call.mask.visible(query.shape[2], key.shape[2], query.device)
        return fused_partial(query, key, value, allowed, causal=causal, scale=call.scale)
    parts = [visible_logsumexp(logits, visible) for logits, visible in logits_of(query, key, call)]
    return sdpa(query, key, value, call), torch.cat(parts, dim=2)


def logits_of(query: Tensor, key: Tensor, call: Call) -> Iterator[tuple[Tensor, Tensor | None]]:
    """For a few queries at a time, yield their logits in fp32 or better and the keys that they see (None: all)."""
    N, M = query.shape[2], key.shape[2]
    query, key = upcast(query, repeat_heads(key, query.shape[1]))
    visible = call.mask.visible(N, M, query.device)
    # All queries together where they are traced: a number of portions would fix the length.
    step = N if torch.compiler.is_compiling() else max(1, CHUNK // M)
    for start in [0] if torch.compiler.is_compiling() else range(0, N, step):
        rows = slice(start, start + step)
        logits = query[:, :, rows] @ key.transpose(-1, -2) * call.scale
        logits = logits if call.bias is None else logits + call.bias[:, :, rows]
        yield logits, visible if visible is None or visible.shape[2] == 1 else visible[:, :, rows]


def with_distances(query: Tensor, key: Tensor, call: Call) -> tuple[Tensor, Call]:
    """The queries and the call of exact attention in which the terms of the distances are a bias."""
    assert call.learned is not None
    (B, H, N, _), M = query.shape, key.shape[2]
    ahead, pairs = every_ahead(call.mask, N, M, query.device)
    query, terms = call.learned(query, call.scale, ahead)
    bias = terms.gather(3, pairs[:, None].expand(B, H, N, M))
    return query, replace(call, bias=bias if call.bias is None else bias + call.bias)


@dataclass(frozen=True)
class Full(Method):
    """Exact attention (SDPA), or with learned terms of the distance in its logits.

    Args:
        positions: "none", or "relative": learned terms of the distance in the logits, as in Transformer-XL. With them
            it runs only as a bound method, and is not exact attention.

    >>> import torch, subquad as sq
    >>> q = k = v = torch.eye(3).view(1, 1, 3, 3)
    >>> sq.attention(q, k, v, method="full", is_causal=True)[0, 0, 0]
    tensor([1., 0., 0.])
    """

    positions: str = choice("none", "relative")

    name: ClassVar[str] = "full"
    traits: ClassVar[Traits] = Traits(
        family="exact",
        causal="strict",
        window=True,
        dense_mask=True,
        bias=True,
        subquadratic=False,
        quadratic_baseline=True,
        exact_limit={},
        complexity="O(N·M·D) time, O(N) memory; O(N·M) memory with a window, segments, a dense mask or a bias",
        source="Vaswani et al. 2017; Dao et al. 2022",
        skips_padding=True,  # which must be finite, as for SDPA
        takes_segments=True,
    )

    @property
    def label(self) -> str:
        """The method with its settings: 'full' alone is the remedy in refusals."""
        return str(self)

    def describe(self) -> Traits:
        """The traits; with relative positions the method has learned parameters, and cross-attention no distances."""
        if self.positions == "none":
            return type(self).traits
        return replace(
            type(self).traits,
            cross=False,
            cached=True,
            order_free=False,
            positional=True,
            learned=True,
            relative=True,
            exact_limit=NOT_EXACT,
            complexity="O(N·M·D) time, O(N·M) memory",
        )

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """u, v and W_R, for relative positions."""
        return RelativePositions(heads, head_dim) if self.positions == "relative" else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Exact attention, with the terms of the distances where there are positions."""
        if self.positions == "none":
            return exact(query, key, value, call)
        query, key, value = upcast(query, key, value)
        query, call = with_distances(query, key, call)
        return exact(query, key, value, call)
