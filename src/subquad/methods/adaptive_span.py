"""Adaptive span: a window whose length each head learns, with a soft edge.

    out_i = Σ_j m(|i − j|) e^{a_ij} v_j / Σ_j m(|i − j|) e^{a_ij},   a_ij = scale · q_i·k_j,   j ≤ i where causal
    m(x)  = clamp((R + z − x) / R, 0, 1)                             Sukhbaatar et al. 2019, equations 3 and 4
    loss  = mean over heads of z / S,   z in [0, S]                  their equation 5 with λ = S · weight

==========  ===========================================
paper       here
==========  ===========================================
z           `Spans.span`, as a share of S
S           `span`
R           `ramp`
m_z         `Spans.mask`
==========  ===========================================

So a head sees the keys nearer than z + R tokens, those up to z fully. The window that is computed is that of the head
with the largest z, so time falls as spans shrink. To find it, a number is read from the parameters, for which a call
waits where they are on a GPU. While a program is recorded (torch.compile, export, CUDA graphs) and under vmap, shapes
cannot follow numbers, and the window is that of z = S, with the same outputs.

Deviations: the ramp begins at S for the largest span, so that z = S means that S tokens count fully; published code has
no key farther away than S. If the optimiser has moved z out of [0, S], z has a gradient from the
output alone, so that it can return; published code clips it after each step.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subquad.core.readable import can_be_read
from subquad.kernels.selection.neighbours import neighbours
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask
from subquad.methods.core.bucketed import Bucketed, attend_inside
from subquad.methods.core.method import Call, Partial, Traits, upcast, whole

LONGEST = 2**20  # more tokens than a window is computed for


class Spans(nn.Module):
    """z of each head, as a share of the largest span."""

    by_query_head: ClassVar[tuple[str, ...]] = ("span",)

    def __init__(self, heads: int, largest: int, ramp: int, start: int):
        super().__init__()
        self.largest, self.ramp = largest, ramp
        self.span = nn.Parameter(torch.full((heads,), start / largest))

    @property
    def tokens(self) -> Float[Tensor, "H"]:
        """z in tokens, in [0, S]."""
        (span,) = upcast(self.span)
        # The gradient is that of z also outside of [0, S]: else a z that a step moved there would stay there.
        return (span + (span.clamp(0, 1) - span).detach()) * self.largest

    def reach(self) -> int:
        """The largest distance at which any head sees a key: that of the head with the largest span."""
        recorded = self.span.is_cuda and torch.cuda.is_current_stream_capturing()
        share = float(self.span.detach().max()) if can_be_read(self.span) and not recorded else 1.0
        share = min(max(share, 0.0), 1.0) if math.isfinite(share) else 1.0
        return math.ceil(share * self.largest + self.ramp) - 1

    def mask(self, reach: int, is_causal: bool, like: Tensor) -> Float[Tensor, "H P"]:
        """ln m for the distances −reach, …, reach (or 0) in tokens ahead; −∞ where m is 0."""
        ahead = torch.arange(-reach, 1 if is_causal else reach + 1, device=like.device)
        ramp_left = self.ramp + self.tokens.to(like.dtype)[:, None] - ahead.abs()
        share = (ramp_left / self.ramp).clamp(max=1.0)
        # Not the logarithm of 0, whose gradient is NaN. NaN is not hidden.
        return torch.where(share <= 0, -torch.inf, torch.where(share <= 0, 1.0, share).log())


def mean_span(model: nn.Module) -> float | None:
    """The mean learned span of a model's heads, in tokens; None if no head learns one."""
    spans = [module.tokens.detach() for module in model.modules() if isinstance(module, Spans)]
    return float(torch.cat(spans).mean()) if spans else None


@dataclass(frozen=True)
class AdaptiveSpan(Bucketed):
    """Window attention in which each head learns its span. Only as a bound method.

    Args:
        span: the largest span, in tokens to each side; with a causal mask, to the past.
        ramp: over how many tokens behind the span the weights fall to 0.
        start: the span that learning starts with.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(64, 4, method=sq.AdaptiveSpan(span=256))
    >>> out = layer(torch.randn(2, 100, 64), is_causal=True)
    >>> loss = sq.nn.with_auxiliary_loss(out.square().mean(), layer, weight=1e-3)
    """

    span: int = whole(1024, least=1, most=LONGEST)
    ramp: int = whole(32, least=1, most=LONGEST)
    start: int = whole(0)

    name: ClassVar[str] = "adaptive-span"
    weighs: ClassVar[bool] = True
    traits: ClassVar[Traits] = Traits(
        family="window",
        causal="strict",
        cross=False,
        cached=True,
        window=True,
        order_free=False,
        positional=True,
        learned=True,
        exact_limit={"span": "N", "start": "N"},
        example={"span": 9, "ramp": 3, "start": 2},
        complexity="O(N·(Z + R)·D) time, O(N·(Z + R + D)) memory for a longest span of Z and a ramp of R",
        source="Sukhbaatar et al. 2019",
        zeroes_padding=True,  # it is in no block
        skips_padding=True,
    )

    def check(self) -> None:
        """Raise ValueError if spans start beyond the largest one."""
        if self.start > self.span:
            raise ValueError(
                f"{self.name!r}: start={self.start} is beyond the largest span, span={self.span}; "
                "it must be at most that"
            )

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module:
        """The initial z of each head."""
        return Spans(heads, self.span, self.ramp, self.start)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attend by blocks to the keys inside the longest span, with ln m in the logits."""
        assert isinstance(call.learned, Spans)
        (buckets,) = self.meetings(query, key, call)
        assert buckets.span is not None
        terms = call.learned.mask(buckets.span, call.mask.is_causal, *upcast(query))
        return attend_inside(query, key, value, buckets, call, of_distance=terms[None, :, None])

    def reach(self, tokens: int, mask: Mask) -> tuple[int, int]:
        """The numbers of tokens before and after itself that a query may see at the largest span."""
        span = min(self.span + self.ramp - 1, tokens)
        return span, 0 if mask.is_causal else span

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet: those inside the longest span."""
        return (neighbours(query, key, call.learned.reach(), call.mask),)

    def auxiliary_loss(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """The mean of z/S, whose gradient ends where z is 0."""
        return call.learned.span.clamp(0, 1).mean()
