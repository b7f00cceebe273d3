"""Sums of exact attention weights over groups of keys and of queries, in linear memory: what hashes learn from."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.kernels.attention.positive_features import positive_features
from subquad.kernels.attention.softmax import visible_softmax
from subquad.kernels.tokens.heads import repeat_heads
from subquad.masks import Mask

CHUNK = 2**22  # weights of a head that are in memory at a time


@torch.no_grad()
def attention_sums(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    mask: Mask,
    scale: float,
    key_weights: Float[Tensor, "B H M C"],
    query_weights: Float[Tensor, "B H N C"],
) -> tuple[Float[Tensor, "B H N C"], Float[Tensor, "B H M C"]]:
    """Σ_j A_ij w_jc for every query and Σ_i u_ic A_ij for every key, A = softmax(scale·q kᵀ) under the mask.

    O(N·M·(D + C)) time, O(N·C) memory: some queries at a time. Padded queries have A = 0.
    """
    M, key = key.shape[2], repeat_heads(key, query.shape[1])
    of_queries, of_keys = [], torch.zeros_like(key_weights)
    for rows, weights in exact_weights(query, key, mask, scale, step=max(1, CHUNK // M)):
        of_queries.append(weights @ key_weights)
        of_keys = of_keys + weights.transpose(-1, -2) @ query_weights[:, :, rows]  # `vmap` may widen it
    return torch.cat(of_queries, dim=2), of_keys


def exact_weights(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B H M D"],
    mask: Mask,
    scale: float,
    *,
    step: int,
    bias: Tensor | None = None,
) -> Iterator[tuple[slice, Float[Tensor, "B H rows M"]]]:
    """A = softmax(scale·q kᵀ + bias) under the mask, for `step` queries at a time; 0 for padded queries."""
    N, M = query.shape[2], key.shape[2]
    visible, valid = mask.visible(N, M, query.device), mask.query_padding(N)
    for start in range(0, N, step):
        rows = slice(start, start + step)
        allowed = visible if visible is None or visible.shape[2] == 1 else visible[:, :, rows]
        logits = query[:, :, rows] @ key.transpose(-1, -2) * scale
        weights = visible_softmax(logits if bias is None else logits + bias[:, :, rows], allowed)
        yield rows, weights if valid is None else weights * valid[:, None, rows, None]


@torch.no_grad()
def approximate_attention_sums(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    mask: Mask,
    scale: float,
    key_weights: Float[Tensor, "B H M C"],
    query_weights: Float[Tensor, "B H N C"],
    *,
    features: int,
    seed: int,
) -> tuple[Float[Tensor, "B H N C"], Float[Tensor, "B H M C"]]:
    """Estimate `attention_sums` by random features (Sun et al. 2022, equations 15 to 17): O(N·features·(D + C)).

        Σ_j A_ij w_jc ≈ φ(q_i)·Σ_j φ(k_j) w_jc / φ(q_i)·Σ_j φ(k_j)
        Σ_i u_ic A_ij ≈ φ(k_j)·Σ_i u_ic φ(q_i) / (φ(q_i)·Σ_l φ(k_l))

    A causal part of the mask is not applied, as in the paper.
    """
    N, M, key = query.shape[2], key.shape[2], repeat_heads(key, query.shape[1])
    of_query, of_key = positive_features(query, key, mask.key_padding(M), scale, features, seed)
    total = of_query @ of_key.sum(2)[..., None]
    of_query = of_query / torch.where(total > 0, total, 1.0)  # 0 where an item has no real key
    valid = mask.query_padding(N)
    of_query = of_query if valid is None else of_query * valid[:, None, :, None]
    return (
        of_query @ (of_key.transpose(-1, -2) @ key_weights),
        of_key @ (of_query.transpose(-1, -2) @ query_weights),
    )
