"""LogSparse attention: a window, and keys at distances that double.

Li, Jin, Xuan, Zhou, Chen, Wang, Yan 2019, "Enhancing the Locality and Breaking the Memory Bottleneck of Transformer on
Time Series Forecasting", section 4.2, with its local attention:

    near_i = {j: |i − j| ≤ window}
    far_i  = {j: |i − j| a power of two}
    out_i  = Σ_{j ∈ near_i ∪ far_i} softmax_j(scale · q_i·k_j) v_j          under a causal mask j ≤ i, as in the paper

So a query meets log₂ N keys, and log₂ N layers carry information from any token to any later one.

Deviations from the paper. Without a causal mask the keys ahead are those at the same distances. The paper's restarts,
subsequences that do not see each other, are packed segments: `Mask.segments`. Distances alone matter, so padding on
either side changes nothing.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subquad.kernels.selection.neighbours import farthest, neighbours
from subquad.kernels.selection.pattern_positions import each_at
from subquad.kernels.tokens.slots import Buckets
from subquad.methods.core.method import Call, Traits, whole
from subquad.methods.core.pattern import Pattern


@dataclass(frozen=True)
class LogSparse(Pattern):
    """Attention to a window, and to the keys 1, 2, 4, 8 and so on tokens away. Self-attention only.

    Args:
        window: tokens to each side that a query sees all of; with a causal mask, to the past. 0 is the query itself.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 300, 4)
    >>> sq.attention(q, k, v, method=sq.LogSparse(window=4), is_causal=True).shape
    torch.Size([1, 2, 300, 4])
    """

    window: int = whole(16)

    name: ClassVar[str] = "logsparse"
    traits: ClassVar[Traits] = replace(
        Pattern.shared_traits,
        example={"window": 2},
        complexity="O(N·(W + log N)·D) time with a window of W",
        source="Li et al. 2019, section 4.2",
    )

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet: near ones, and those at powers of two beyond the window."""
        mask, M = call.mask, key.shape[2]
        near, powers = neighbours(query, key, self.window, mask), self.window.bit_length()
        most = powers
        while 2**most <= farthest(query.shape[2], M, mask):
            most += 1
        if most == powers:
            return (near,)
        distances = 2 ** torch.arange(powers, most, device=query.device)
        distances = -distances if mask.is_causal else torch.cat([-distances, distances])
        return near, each_at(distances, mask, query, M)
