"""Nyström attention: the softmax matrix from a few landmarks (Xiong et al. 2021).

    q̃, k̃   = means of the queries, and of the keys, of each of L pools of equal size
    out     = F Z B V,    F = softmax(scale · Q k̃ᵀ),   A = softmax(scale · q̃ k̃ᵀ),   B = softmax(scale · q̃ Kᵀ)
    Z_0     = Aᵀ / (largest row sum of A · largest column sum of A),   and Z ≈ A⁺ after `iterations` of
    Z       ← ¼ Z (13 I − A Z (15 I − A Z (7 I − A Z)))                             Razavi et al. 2014
    out     + a depthwise convolution of V over the sequence, learned, with `convolution` > 0

====================  ============================
paper                 here
====================  ============================
m                     `landmarks`
Q̃, K̃                  `landmarks_of`
Ã                     `core`
Z*                    `pseudo_inverse`
the skip connection   `Convolution`
====================  ============================

Pools are cut from each item's own real tokens, for queries and keys separately, so padding changes nothing. An item
with no more keys than landmarks has a landmark for each key. F then has the weights of exact attention, so F V is exact
attention, and Z, which would only approach the same, is left out.

Deviations: the published code divides by the largest column sum in the whole batch, so that items depend on each other;
here each item and head has its own. A has row sums of 1, so only the columns' are looked for. Z is computed in fp64:
where A has no full rank, each iteration makes rounding errors 13/4 times as large.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from subquad.core.randomness import normal
from subquad.kernels.attention.softmax import visible_softmax
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.pools import pool_means, pool_of
from subquad.kernels.tokens.positions import ranks
from subquad.masks import Mask
from subquad.methods.core.exact import sdpa
from subquad.methods.core.method import WIDEST, Call, Method, Partial, Traits, upcast, whole

START = 0.02  # deviation of the convolution's kernel as it starts
MOST_ITERATIONS = 24  # beyond, rounding errors grow above what is left to gain
TOO_MANY = f"it must be at most {MOST_ITERATIONS}: where A has no full rank, more of them let rounding errors grow"


def landmarks_of(
    x: Float[Tensor, "B H M D"], valid: Bool[Tensor, "B M"] | None, count: int
) -> tuple[Float[Tensor, "B H L D"], Bool[Tensor, "#B L"]]:
    """Mean of each pool, and which of them have a token."""
    M = x.shape[2]
    tokens = M if valid is None else valid.sum(1, keepdim=True)
    label = pool_of(ranks(valid, M, x.device), tokens, count)
    label = label if valid is None else torch.where(valid, label, count)
    means, sizes = pool_means(x, label, count)
    return means, sizes > 0


def pseudo_inverse(a: Float[Tensor, "B H L L"], iterations: int) -> Float[Tensor, "B H L L"]:
    """A⁺ of each matrix by itself. Its rows sum to 1, or are 0; rows and columns of 0 stay out of it."""
    most = a.sum(-2).amax(-1)[..., None, None]
    z = a.transpose(-1, -2) / most.masked_fill(most == 0, 1.0)
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for _ in range(iterations):
        az = a @ z
        z = 0.25 * z @ (13 * one - az @ (15 * one - az @ (7 * one - az)))
    return z


def inverse_core(
    of_query: Float[Tensor, "B H L D"],
    rows: Bool[Tensor, "#B L"],
    of_key: Float[Tensor, "B H L D"],
    columns: Bool[Tensor, "#B L"],
    scale: float,
    iterations: int,
) -> Float[Tensor, "B H L L"]:
    """Z of the landmarks, of which `rows` and `columns` have a token."""
    core = visible_softmax(of_query @ of_key.transpose(-1, -2) * scale, columns[:, None, None])
    return pseudo_inverse((core * rows[:, None, :, None]).double(), iterations).to(core.dtype)


def nystrom(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    call: Call,
    landmarks: int,
    iterations: int,
) -> Float[Tensor, "B H N E"]:
    """F Z B V, in the dtype of the inputs, which is fp32 or fp64."""
    H, valid = query.shape[1], call.mask.key_padding(key.shape[2])
    if valid is None and torch.compiler.is_exporting():  # the length is not known, and may be less than the landmarks
        valid = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    of_query, rows = landmarks_of(query, call.mask.query_padding(query.shape[2]), landmarks)
    of_key, columns = landmarks_of(key, valid, landmarks)
    of_key = repeat_heads(of_key, H)
    read = sdpa(of_query, key, value, replace(call.under(keys_only(valid)), dropout_p=0.0))  # B V
    middle = inverse_core(of_query, rows, of_key, columns, call.scale, iterations) @ read
    if valid is not None:
        pooled, _ = landmarks_of(value, valid, landmarks)
        few = valid.sum(1) <= landmarks
        middle = torch.where(few[:, None, None, None], repeat_heads(pooled, H), middle)
    return sdpa(query, of_key, middle, call.under(keys_only(None if valid is None else columns)))


def keys_only(keys: Tensor | None) -> Mask:
    """The mask that hides keys alone."""
    return Mask() if keys is None else Mask.padding(keys=keys)


def valid_values(value: Float[Tensor, "B G M E"], mask: Mask) -> Float[Tensor, "B G M E"]:
    """The values, 0 where they are padding."""
    valid = mask.key_padding(value.shape[2])
    return value if valid is None else value.masked_fill(~valid[:, None, :, None], 0.0)


class Convolution(nn.Module):
    """One kernel for each key head, over the sequence of the values. Its start is always the same."""

    by_key_head: ClassVar[tuple[str, ...]] = ("kernel",)

    def __init__(self, kv_heads: int, width: int):
        super().__init__()
        self.kernel = nn.Parameter(START * normal(0, kv_heads, width, like=torch.zeros(1)))

    def forward(self, value: Float[Tensor, "B G M E"]) -> Float[Tensor, "B G M E"]:
        """Σ_j w_j v_{i + j − ⌊width/2⌋}; 0 beyond the ends."""
        B, G, M, E = value.shape
        width = self.kernel.shape[1]
        kernel = self.kernel.to(value.dtype)[:, None]
        value = F.pad(value, (0, 0, width // 2, (width - 1) // 2))
        rows = value.permute(0, 3, 1, 2).flatten(0, 1)
        return F.conv1d(rows, kernel, groups=G).view(B, E, G, M).permute(0, 2, 3, 1)


@dataclass(frozen=True)
class Nystrom(Method):
    """Attention through landmarks, whose softmax matrix is inverted by iteration.

    Args:
        landmarks: L, of queries and of keys; no more keys than landmarks: exact.
        iterations: iterations of the pseudo-inverse, at most 24.
        convolution: width of a learned kernel over the values, added to the output; 0 has none. With it, the method
            runs only as a bound method.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 300, 4)
    >>> sq.attention(q, k, v, method=sq.Nystrom(landmarks=20)).shape
    torch.Size([1, 2, 300, 4])
    """

    landmarks: int = whole(64, least=1)
    iterations: int = whole(6, least=1, most=MOST_ITERATIONS, beyond=TOO_MANY)
    convolution: int = whole(0, most=WIDEST)

    name: ClassVar[str] = "nystrom"
    traits: ClassVar[Traits] = Traits(
        family="summary",
        dropout="weights of the landmarks",
        lse=False,
        order_free=False,
        positional=True,
        normalised=False,
        exact_limit={"landmarks": "M"},
        example={"landmarks": 5},
        complexity="O((N + M)·L·D + L³) time, O((N + M)·D + L²) memory for L landmarks",
        source="Xiong et al. 2021",
    )

    def describe(self) -> Traits:
        """The traits; with a convolution, the method has learned parameters and needs self-attention."""
        if self.convolution == 0:
            return type(self).traits
        why = "a learned convolution of the values is added to the output"
        return replace(type(self).traits, learned=True, cross=False, exact_limit=why)

    def make_learned(self, heads: int, kv_heads: int, head_dim: int, max_length: int | None) -> nn.Module | None:
        """The initial kernels of the convolution."""
        return Convolution(kv_heads, self.convolution) if self.convolution else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
        """Attend through landmarks, in which positions count the tokens of each segment."""
        query, key, value = upcast(query, key, value)
        if not torch.compiler.is_exporting() and key.shape[2] <= self.landmarks:
            out = sdpa(query, key, value, call)
        else:
            out = nystrom(query, key, value, call, self.landmarks, self.iterations)
        if call.learned is None:
            return out, None
        return out + repeat_heads(call.learned(valid_values(value, call.mask)), query.shape[1]), None
