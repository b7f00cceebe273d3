"""Strided attention of the Sparse Transformer: the tokens near a query, and every l-th one.

Child, Gray, Radford, Sutskever 2019, "Generating Long Sequences with Sparse Transformers", section 4.3:

    near_i = {j: |i − j| ≤ l}
    far_i  = {j: i − j a multiple of l}
    out_i  = Σ_j softmax_j(scale · q_i·k_j) v_j,   j ∈ near_i ∪ far_i      sets="merged"
                                                   j ∈ near_i, or far_i    "near", "far"; "heads": half of them each

Under a causal mask j ≤ i, as in the paper. With l near √N a query meets 2√N keys, and two layers, or one and the layer
after it, carry information from any token to any later one.

==========  ==============================================
paper       here
==========  ==============================================
l           stride
A^(1)       near
A^(2)       far
p           sets: merged, by heads, or by layers
==========  ==============================================

If layers interleave the two sets, as in the paper, they get sets="near" and sets="far" in turn. i and j
count all tokens of the tensor; since distances alone matter, padding on either side changes nothing.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subquad.kernels.attention.softmax import merge_partials
from subquad.kernels.selection.neighbours import farthest, neighbours
from subquad.kernels.selection.pattern_positions import each_at, of_heads
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask
from subquad.methods.core.bucketed import attend_inside
from subquad.methods.core.method import Call, Partial, Traits, choice, whole
from subquad.methods.core.pattern import SETS, Pattern, with_sets


@dataclass(frozen=True)
class Strided(Pattern):
    """Attention to the keys near a query, and to every `stride`-th one. Self-attention only.

    Args:
        stride: l, how far a query sees to each side (with a causal mask, to the past), and from which to which distant
            key it goes. About √N is cheapest.
        sets: "merged", near and distant keys in one softmax; "heads", near ones in the first half of the heads and
            distant ones in the others; "near" or "far", one kind in all heads.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 300, 4)
    >>> sq.attention(q, k, v, method=sq.Strided(stride=16), is_causal=True).shape
    torch.Size([1, 2, 300, 4])
    """

    stride: int = whole(128, least=1, clamped=True)
    sets: str = choice(*SETS)

    name: ClassVar[str] = "strided"
    traits: ClassVar[Traits] = replace(
        Pattern.shared_traits,
        subquadratic=False,
        exact_limit={"stride": "N"},
        example={"stride": 4},
        complexity="O(N·(l + N/l)·D) time with a stride of l, which is O(N√N·D) at l = √N",
        source="Child et al. 2019, section 4.3",
    )

    def describe(self) -> Traits:
        """The traits: which setting sees all keys depends on the sets, and a window alone takes linear time."""
        why = "half of the heads see near keys only, and half distant ones only"
        return with_sets(type(self).traits, self.sets, far={"stride": 1}, heads=why)

    def reach(self, tokens: int, mask: Mask) -> tuple[int, int]:
        """The numbers of tokens before and after itself that a query sees."""
        span = min(self.stride, tokens)
        return span, 0 if mask.is_causal else span

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attend to near and to distant keys; a query's own key counts as near."""
        sets = self.meetings(query, key, call)
        if self.sets != "merged" or not call.mask.aligned:
            return attend_inside(query, key, value, sets, call)
        near, far = sets
        others = attend_inside(query, key, value, far, call, other_keys_only=True)
        return merge_partials([attend_inside(query, key, value, near, call), others])

    def meetings(self, query: Tensor, key: Tensor, call: Call) -> tuple[Buckets, ...]:
        """Pairs of queries and keys that meet: near and distant ones; each query's own key counts once."""
        (N, M), mask, merged = (query.shape[2], key.shape[2]), call.mask, self.sets == "merged"
        # Merged, the keys l tokens away are left to the distant ones.
        near = neighbours(query, key, self.stride - 1 if merged else self.stride, mask)
        if merged and not mask.aligned:  # there a query's number differs from that of the key at its position
            distances = self.stride * torch.arange(1, farthest(N, M, mask) // self.stride + 1, device=query.device)
            distances = -distances if mask.is_causal else torch.cat([-distances, distances])
            return near, each_at(distances, mask, query, M)
        far = neighbours(query, key, farthest(N, M, mask), mask, dilation=self.stride)
        if self.sets == "heads":
            first = call.first_half(query)
            return of_heads(near, N, first), of_heads(far, N, ~first)
        return {"merged": (near, far), "near": (near,), "far": (far,)}[self.sets]
