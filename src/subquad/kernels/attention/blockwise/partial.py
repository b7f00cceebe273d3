"""Exact attention with its log-sum-exp, at the speed of SDPA: the kernels below it return both, and SDPA does not.

    out_i = Σ_j p_ij v_j,   lse_i = ln Σ_j e^{a_ij},   p_ij = e^{a_ij − lse_i},   a_ij = scale·q_i·k_j (+ bias_ij)

With gradients g of out and γ of lse, ∂/∂a_ij = p_ij·(g_i·v_j − g_i·out_i + γ_i). The kernels know no γ. One more column
gives it to them: there g is 1, v is 0 and out is −γ.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from subquad.kernels.attention.blockwise.kernels import Kernels, on_cpu, on_gpu, widened, with_positive_scale
from subquad.kernels.attention.softmax import hide
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.transforms import transform

STEP = 8  # the kernels' widths are multiples of it
LANES = 16  # of fewer keys, torch's kernel makes 0 where all logits of a row are NaN


def is_fused(query: Tensor) -> bool:
    """True if a kernel of torch's for CPUs computes the partial: outside of transforms and of compiled code."""
    return on_cpu(query) and not torch.compiler.is_compiling() and transform() is None


def is_fused_on_gpu(query: Tensor) -> bool:
    """True if a kernel of torch's for GPUs computes the partial: outside of transforms and of compiled code."""
    return on_gpu(query) and not torch.compiler.is_compiling() and transform() is None


def fused_partial(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    allowed: Bool[Tensor, "#B #H #N M"] | None = None,
    *,
    causal: bool = False,
    scale: float,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Exact attention and its log-sum-exp in fp32 (fp64 for fp64 inputs), in memory that is linear in N and M.

    `allowed` marks pairs that meet (None: all); `causal`: query i meets the keys up to key i. A query that meets none
    has out 0 and lse −∞. Differentiable; a second derivative computes all N·M logits.
    """
    if key.shape[2] < LANES:
        return plain_partial(query, key, value, allowed, causal=causal, scale=scale)
    query, scale = with_positive_scale(query, scale)
    if on_gpu(query):  # whose kernels share no keys between heads
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    out, lse = _FusedPartial.apply(query, key, value, allowed, causal, scale)
    return out, lse


class _FusedPartial(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        none = None if allowed is None else ~allowed.any(-1, keepdim=True)
        q, k, v = _in_one_width(query, key, value)
        out, lse = Kernels(_bias(allowed, none), causal, scale).forward(q, k, v)
        out = out[..., : value.shape[3]]
        if none is not None:
            out, lse = out.masked_fill(none, 0.0), lse.masked_fill(none[..., 0], -torch.inf)
        ctx.save_for_backward(query, key, value, allowed, out, lse)
        ctx.settings = causal, scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, of_out: Tensor, of_lse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, allowed, out, lse = ctx.saved_tensors
        causal, scale = ctx.settings
        if torch.is_grad_enabled():  # a second derivative is wanted
            inputs, needed = (query, key, value), ctx.needs_input_grad[:3]
            results = plain_partial(*inputs, allowed, causal=causal, scale=scale)
            tracked = [(x, of_x) for x, of_x in zip(results, (of_out, of_lse), strict=True) if x.requires_grad]
            outputs, slopes = zip(*tracked, strict=True)
            wanted = [x for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
            of_wanted = iter(torch.autograd.grad(outputs, wanted, slopes, create_graph=True, allow_unused=True))
            return *(next(of_wanted) if is_needed else None for is_needed in needed), None, None, None
        none = None if allowed is None else ~allowed.any(-1, keepdim=True)
        if none is not None:
            of_out, of_lse = of_out.masked_fill(none, 0.0), of_lse.masked_fill(none[..., 0], 0.0)
            lse = lse.masked_fill(none[..., 0], 0.0)
        column = torch.ones_like(query[..., :1])
        g = torch.cat([of_out.to(query.dtype), column], dim=3)
        out = torch.cat([out.to(query.dtype), -of_lse.to(query.dtype).unsqueeze(-1)], dim=3)
        q, k, v, g, out = _in_one_width(query, key, value, g, out)
        of_query, of_key, of_value = Kernels(_hidden(allowed), causal, scale).backward(g, q, k, v, out, lse)
        D, E = query.shape[3], value.shape[3]
        return of_query[..., :D], of_key[..., :D], of_value[..., :E], None, None, None


def plain_partial(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Exact attention and its log-sum-exp in plain PyTorch, from all N·M logits."""
    q, k, v = upcast(query, repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1]))
    if causal:
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    logits = hide(q @ k.mT * scale, allowed)
    out, lse = (logits.softmax(-1) @ v).to(query.dtype), logits.logsumexp(-1)
    if allowed is None:
        return out, lse
    none = ~allowed.any(-1, keepdim=True)
    return out.masked_fill(none, 0.0), lse.masked_fill(none[..., 0], -torch.inf)


def _in_one_width(*tensors: Tensor) -> list[Tensor]:
    width = -(-max(x.shape[3] for x in tensors) // STEP) * STEP
    return widened(width, *tensors)


def _bias(allowed: Tensor | None, none: Tensor | None) -> Tensor | None:
    """−∞ where a pair does not meet; a query that meets no key meets all here, for finite numbers."""
    return None if allowed is None or none is None else _hidden(allowed | none)


def _hidden(allowed: Tensor | None) -> Tensor | None:
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill(~allowed, -torch.inf)
