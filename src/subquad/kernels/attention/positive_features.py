"""Positive random features of the softmax kernel for all tokens at once: where sums of attention are wanted."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from subquad.core.randomness import normal
from subquad.kernels.attention.feature_maps import exponential_map


def positive_features(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H M D"],
    valid: Bool[Tensor, "B M"] | None,
    scale: float,
    features: int,
    seed: int,
) -> tuple[Float[Tensor, "B H N R"], Float[Tensor, "B H M R"]]:
    """φ(q), φ(k) ≥ 0 with E[φ(q_i)·φ(k_j)] = a_i e^{scale·q_i·k_j}: for attention, which does not see a_i.

        φ(x) = exp(w·x − ‖x‖²/2),  w ~ N(0, I),  x scaled by √scale        Choromanski et al. 2021, lemma 1

    Stabilised without an epsilon: the exponents of feature r are taken less their maximum c_r over the real keys, which
    comes back in the query's exponents, less their own maximum. So φ(q_i)·Σ_j φ(k_j) ≥ 1. Padded keys have φ = 0.
    """
    mapped = exponential_map("positive", normal(seed, features, query.shape[3], like=query), 0.0)
    query, key = query * abs(scale) ** 0.5, key * (abs(scale) ** 0.5 * (1 if scale >= 0 else -1))
    of_key = mapped.exponents(key)
    of_key = of_key if valid is None else of_key.masked_fill(~valid[:, None, :, None], -torch.inf)
    largest = of_key.amax(2, keepdim=True)
    largest = torch.where(torch.isneginf(largest), 0.0, largest)
    of_query = query @ mapped.rows.T + largest
    return (of_query - of_query.amax(-1, keepdim=True)).exp(), (of_key - largest).exp()
