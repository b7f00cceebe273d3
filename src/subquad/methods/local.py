"""Local attention: every query attends to the keys near it, with or without terms of their distance.

    out_i = Σ_{j: |i − j| ≤ window} softmax_j(a_ij) v_j          under a causal mask j ≤ i: the last window + 1 keys
    a_ij  = scale · q_i·k_j                                                              positions="none"
    a_ij  = scale · ((q_i + u)·k_j + (q_i + v)·W_R r_{i−j})                              positions="relative"

The second is that of Dai et al. 2019, "Transformer-XL", section 3.3: r_{i−j} holds sines and cosines of the distance,
and u, v and W_R are learned, for each head its own.

==========  =============================
paper       here
==========  =============================
u           `content`
v           `position`
W_{k,R}     `weight`
R           `sinusoids`
==========  =============================

Blocks of queries meet the one range of keys that their windows reach, so nothing is N×N. Only the distances inside the
window are computed. i and j are positions in the tensor, so padding on either side changes no distance; the mask's
offset places the queries among the keys, so a step on a cache is the same thing.

Deviations from the paper: the sinusoids are as wide as all the heads together, since a layer's width is not known here.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from subquad.kernels.attention.relative_positions import NOT_EXACT, RelativePositions, window_ahead
from subquad.kernels.selection.neighbours import neighbours
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask
from subquad.methods.core.bucketed import StepByPosition, attend_inside
from subquad.methods.core.call import PrepareStep
from subquad.methods.core.method import Call, Partial, Traits, choice, upcast, whole
from subquad.methods.core.onnx import OnnxSupport
from subquad.methods.core.pattern import Pattern


@dataclass(frozen=True)
class Local(Pattern):
    """Window attention: each query sees the keys at most `window` tokens away.

    Args:
        window: tokens to each side; with a causal mask, to the past. The mask's own window narrows it.
        positions: "none", or "relative": learned terms of the distance in the logits, as in Transformer-XL. With them
            it runs only as a bound method.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 300, 4)
    >>> near = sq.attention(q, k, v, method=sq.Local(window=20))
    >>> exact = sq.attention(q, k, v, method="full", mask=sq.Mask.window(20))
    >>> torch.allclose(near, exact, atol=1e-5)
    True
    """

    window: int = whole(64)
    positions: str = choice("none", "relative")

    name: ClassVar[str] = "local"
    onnx: ClassVar[OnnxSupport] = "always"
    pairs_once: ClassVar[bool] = True
    traits: ClassVar[Traits] = replace(
        Pattern.shared_traits,
        source="Child et al. 2019 and Beltagy et al. 2020 (windows); Dai et al. 2019 (relative positions)",
    )

    def describe(self) -> Traits:
        """The traits; with relative positions the method has learned parameters."""
        if self.positions == "none":
            return type(self).traits
        return replace(type(self).traits, learned=True, relative=True, exact_limit=NOT_EXACT)

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """u, v and W_R, for relative positions."""
        return RelativePositions(heads, head_dim) if self.positions == "relative" else None

    @property
    def prepare_step(self) -> PrepareStep | None:
        """The preparation of exact attention to the window, without relative positions."""
        return StepByPosition(self) if self.positions == "none" else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attend by blocks; positions count the tokens of each segment."""
        (buckets,), terms = self.meetings(query, key, call), None
        if self.positions == "relative":
            assert buckets.span is not None
            ahead = window_ahead(buckets.span, call.mask.is_causal, query.device)
            query, terms = call.learned(*upcast(query), call.scale, ahead)
        return attend_inside(query, key, value, buckets, call, of_distance=terms)

    def reach(self, tokens: int, mask: Mask) -> tuple[int, int]:
        """The numbers of tokens before and after itself that a query sees."""
        span = min(self.window if mask.span is None else min(self.window, mask.span), tokens)
        return span, 0 if mask.is_causal else span

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet."""
        return (neighbours(query, key, self.window, call.mask),)
