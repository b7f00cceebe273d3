"""The spectrum of exact attention: the singular values of its weights.

Wang, Li, Khabsa, Fang, Ma 2020, "Linformer: Self-Attention with Linear Complexity", section 3 and figure 1, with
P = softmax(scale·Q Kᵀ) of one head and σ_1 ≥ σ_2 ≥ … its singular values:

    Y(j) = Σ_{i≤j} σ_i / Σ_i σ_i

One that rises at once means that P is close to a matrix of low rank. The matrix that it is close to depends on the
input; Y does not show whether a projection that does not look at the input, as Linformer's, finds it.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.kernels.attention.softmax import visible_softmax
from subquad.kernels.tokens.heads import repeat_heads
from subquad.methods import Full
from subquad.tools.measure.hooks import asked

MOST = 128  # the index of the paper's heat map, at 512 tokens


@torch.no_grad()
def singular_values(
    query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], **options: Any
) -> list[Float[Tensor, "H rank"]]:
    """For each item the singular values of each head's P in fp64, largest first; rank = min(real queries, real keys).

    Padded queries and keys are left out of P. One P of one head is in memory at a time: O(N·M), in O(N·M·min(N, M)).

    Args:
        options: as in `subquad.attention`: `mask`, `scale`, `bias`.

    Raises:
        ValueError: what `subquad.attention` refuses; packed segments.

    >>> import torch
    >>> same = torch.ones(1, 1, 4, 2)  # all keys are one: every query has the same weights
    >>> singular_values(same, same)[0].round(decimals=6).abs()
    tensor([[1., 0., 0., 0.]], dtype=torch.float64)
    """
    query, key, call = asked(Full(), query.double(), key.double(), **options)
    B, H, N, M = *query.shape[:3], key.shape[2]
    key = repeat_heads(key, H)
    of_pairs = [call.bias, call.mask.visible(N, M, query.device)]
    bias, visible = (None if each is None else each.expand(B, H, N, M) for each in of_pairs)
    sides = call.mask.query_padding(N), call.mask.key_padding(M)

    def of_head(b: int, h: int) -> Tensor:
        logits = query[b, h] @ key[b, h].mT * call.scale
        logits = logits if bias is None else logits + bias[b, h]
        weights = visible_softmax(logits, None if visible is None else visible[b, h])
        queries, keys = (slice(None) if side is None else side[b] for side in sides)
        return torch.linalg.svdvals(weights[queries][:, keys])

    return [torch.stack([of_head(b, h) for h in range(H)]) for b in range(B)]


def cumulative(values: Float[Tensor, "H rank"]) -> Float[Tensor, "H rank"]:
    """Y: entry j − 1 is the share of the j largest singular values in the sum of all."""
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def needed(values: Float[Tensor, "H rank"], share: float) -> Float[Tensor, "H"]:
    """The smallest j with Y(j) ≥ share."""
    return (cumulative(values) < share).sum(-1) + 1.0


def heat_map_index(length: int) -> int:
    """The j of the heat map: the paper's 128, and a quarter of sequences that are shorter than its 512."""
    return max(1, min(MOST, length // 4))
