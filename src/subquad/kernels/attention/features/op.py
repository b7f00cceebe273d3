"""Attention by features: weights that are sums of products of a query's and a key's features.

    x_ir = u_r·q_i + b_r,   y_jr = w_r·k_j + a_j,   w_ij = Σ_r e^{x_ir + y_jr}
    out_i = Σ_j w_ij v_j / Σ_j w_ij,   lse_i = ln Σ_j w_ij          over the keys j that query i sees

Features are given by their exponents, so that no size of the inputs makes them overflow or vanish and nothing is added
to the denominator: see `state`. The work is O((N + M)·R·(D + E)).
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.kernels.attention.features import reference
from subquad.kernels.dispatch import Op
from subquad.kernels.operators import Gradient
from subquad.kernels.precision import upcast
from subquad.kernels.tensors import token_major

TILE = 64  # tokens that compiled kernels take at a time


@Op
def feature_attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M C"],
    value: Float[Tensor, "B G M E"],
    *,
    of_query: Float[Tensor, "#H R D"] | None = None,
    of_key: Float[Tensor, "#G R C"] | None = None,
    feature_bias: Float[Tensor, "#H R"] | None = None,
    key_bias: Float[Tensor, "B #G M"] | None = None,
    causal: bool = False,
    lagged: tuple[int, int] | None = None,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Attention by exponential features, with its log-sum-exp.

    Args:
        query: (B,H,N,D); without `of_query` the exponents x themselves, (B,H,N,R).
        key: (B,G,M,C), H a multiple of G; without `of_key` the exponents y, (B,G,M,R). An exponent may be −inf.
        value: (B,G,M,E).
        of_query: u, for each head or one for all.
        of_key: w.
        feature_bias: b, for each head or one for all.
        key_bias: a; −inf hides a key.
        causal: query i sees the keys j ≤ i; N = M.
        lagged: (block, lag ≥ 1): query i sees the keys of blocks ⌊j/block⌋ ≤ ⌊i/block⌋ − lag; N = M.

    A query that sees no key has output 0 and lse −inf. Both are in fp32 or better.
    """
    assert not (causal and lagged), "one pattern at a time"
    query, key, value = upcast(query, key, value)
    maps = {"of_query": of_query, "of_key": of_key, "feature_bias": feature_bias, "key_bias": key_bias}
    of_query, of_key = exponents(query, key, **maps)
    if key_bias is not None:  # a hidden key's value may be anything, also NaN, and 0·NaN is NaN
        value = value.masked_fill(torch.isneginf(key_bias).unsqueeze(-1), 0.0)
    return reference.feature_attention(of_query, of_key, value, causal, lagged)


@feature_attention.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor]:
    """Run on a compiled backend, where exponents never exist for the whole sequence.

    Only where a projection itself is learned they are made here, by PyTorch, which has its gradient.
    """
    query, key, of_query, of_key, feature_bias = x.query, x.key, x.of_query, x.of_key, x.feature_bias
    if learned(of_query) or learned(feature_bias):
        query = upcast(query)[0] if of_query is None else upcast(query)[0] @ of_query.mT
        query = query if feature_bias is None else query + feature_bias.unsqueeze(-2)
        of_query = feature_bias = None
    if of_key is not None and learned(of_key):
        key, of_key = upcast(key)[0] @ of_key.mT, None
    block, lag = (int(x.causal), 0) if x.lagged is None else x.lagged
    inputs = query, key, x.value, of_query, of_key, feature_bias, x.key_bias
    out, lse, _ = features_forward.run(backend, *inputs, block, lag)
    return out, lse


def learned(x: Tensor | None) -> bool:
    """True if it wants a gradient, which the compiled kernels do not give a map."""
    return x is not None and x.requires_grad and torch.is_grad_enabled()


INPUTS = "query", "key", "value", "of_query", "of_key", "feature_bias", "key_bias"


@feature_attention.operator(*INPUTS, "block", "lag", block=int, lag=int)
def features_forward(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate out, lse, and the residual that rounding took from lse, which the backward pass reads.

    block 0: every query sees every key; lag 0: causal.
    """
    fine = torch.promote_types(x.query.dtype, torch.float32)
    lse, residual = (x.query.new_empty(x.query.shape[:3], dtype=fine) for _ in range(2))
    return token_major(x.query, x.value.shape[3], fine), lse, residual


features_backward = Gradient(features_forward, "query", "key", "value", "key_bias", title="attention by features")


def check_pattern(x: Any) -> None:
    """Refuse a pattern over queries and keys that are not the same tokens."""
    N, M = x.query.shape[2], x.key.shape[2]
    if x.block < 0 or x.lag < 0 or (x.block > 0 and N != M):
        pattern = (x.block, x.lag)
        raise ValueError(f"feature_attention: a pattern of {pattern} is not supported with {N} queries and {M} keys")


def products(x: Any) -> int:
    """Multiplications of the forward pass, by shapes: exponents, states, reads, and pairs of half a tile."""
    (B, H, N, D), (_, G, M, C), (*_, E) = x.query, x.key, x.value
    R = D if x.of_query is None else x.of_query[1]
    queries, keys = E + (0 if x.of_query is None else D), E + (0 if x.of_key is None else C)
    pairs = B * H * N * TILE // 2 * (R + E) if x.block and not x.lag else 0
    return R * (B * H * N * queries + B * G * M * keys) + pairs


@features_forward.flops
def forward_flops(x: Any) -> int:
    """Operations of the products."""
    return 2 * products(x)


@features_backward.flops
def backward_flops(x: Any) -> int:
    """The exponents and states again, of both sides; the gradients of exponents, values and rows."""
    (B, H, N, D), (_, G, M, C), (*_, E) = x.query, x.key, x.value
    R = D if x.of_query is None else x.of_query[1]
    queries = 2 * E + (0 if x.of_query is None else 3 * D)
    keys = 3 * E + (0 if x.of_key is None else 3 * C)
    pairs = B * H * N * TILE * 3 * (R + E) if x.block and not x.lag else 0
    return 2 * (R * (B * H * N * queries + B * G * M * keys) + pairs)


def exponents(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M C"],
    *,
    of_query: Float[Tensor, "#H R D"] | None = None,
    of_key: Float[Tensor, "#G R C"] | None = None,
    feature_bias: Float[Tensor, "#H R"] | None = None,
    key_bias: Float[Tensor, "B #G M"] | None = None,
) -> tuple[Float[Tensor, "B H N R"], Float[Tensor, "B G M R"]]:
    """x and y."""
    x = query if of_query is None else query @ of_query.mT
    x = x if feature_bias is None else x + feature_bias.unsqueeze(-2)
    y = key if of_key is None else key @ of_key.mT
    return x, y if key_bias is None else y + key_bias.unsqueeze(-1)
