"""The dynamics of fitting hash functions, step by step: divergences and negative entropies of bucket utilities.

Sun, Yang, Yoo 2022, "Sparse Attention with Learning-to-Hash", appendix F and figure 4, with ψ and ψ' normalised over
the buckets:

    kl                = mean over tokens and heads of KL(ψ ‖ softmax H)          equations 13 and 19
    negative entropy  = mean over tokens and heads of Σ_b ψ_b ln ψ_b             in [−ln B, 0]
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.kernels.selection.hash_functions import divergence
from subquad.methods import BoundMethod, LearnedHash
from subquad.tools.measure.hooks import asked


@dataclass(frozen=True)
class Dynamics:
    """The state of one layer's hash functions."""

    kl_query: float
    kl_key: float
    negative_entropy_query: float
    negative_entropy_key: float


@torch.no_grad()
def hash_dynamics(
    bound: BoundMethod, query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], **options: Any
) -> Dynamics:
    """Divergence and negative entropy of a bound `lha` on a layer's queries and keys. O(N·M) time, O(N) memory.

    `kl_query + kl_key` is its auxiliary loss. `options` are those of `subquad.attention`.

    Raises:
        ValueError: not a bound `lha`, or a call that it refuses.
    """
    method = bound.method
    if not isinstance(method, LearnedHash):
        raise ValueError(f"{method.name!r} has no utilities of buckets; this is for a bound 'lha'")
    query, key, call = asked(bound, query, key, **options)
    of_query, of_key = method.scores(query, key, call)
    psi_query, psi_key = method.utilities(query, key, of_query, of_key, call)
    return Dynamics(
        kl_query=float(divergence(psi_query, of_query)),
        kl_key=float(divergence(psi_key, of_key)),
        negative_entropy_query=float(negative_entropy(psi_query)),
        negative_entropy_key=float(negative_entropy(psi_key)),
    )


def negative_entropy(psi: Float[Tensor, "B H N C"]) -> Float[Tensor, ""]:
    """Mean over tokens and heads of Σ_b ψ_b ln ψ_b, ψ normalised over the buckets here; in [−ln B, 0].

    Tokens without utility in any bucket are left out: those of padding.
    """
    total = psi.sum(-1, keepdim=True)
    counted = total[..., 0] > 0
    psi = psi / torch.where(total > 0, total, 1.0)
    each = torch.special.xlogy(psi, psi).sum(-1)
    return (each * counted).sum() / counted.sum().clamp(min=1)
