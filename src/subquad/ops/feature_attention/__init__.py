"""Attention by features: weights that are sums of products of a query's and a key's features.

    x_ir = u_r·q_i + b_r,   y_jr = w_r·k_j + a_j,   w_ij = Σ_r e^{x_ir + y_jr}
    out_i = Σ_j w_ij v_j / Σ_j w_ij,   lse_i = ln Σ_j w_ij          over the keys j that query i sees

Features are given by their exponents, so that no size of the inputs makes them overflow or vanish and nothing is added
to the denominator: see `state`. The work is O((N + M)·R·(D + E)).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.ops.backends import choose
from subquad.ops.feature_attention import cpu, reference


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

    A query that sees no key has output 0 and lse −inf. fp32 or fp64.
    """
    assert not (causal and lagged), "one pattern at a time"
    maps = {"of_query": of_query, "of_key": of_key, "feature_bias": feature_bias, "key_bias": key_bias}
    if choose(cpu=cpu.refusal(query)) == "cpu":
        return cpu.feature_attention(query, key, value, **maps, causal=causal, lagged=lagged)
    of_query, of_key = exponents(query, key, **maps)
    if key_bias is not None:  # a hidden key's value may be anything, also NaN, and 0·NaN is NaN
        value = value.masked_fill(torch.isneginf(key_bias).unsqueeze(-1), 0.0)
    return reference.feature_attention(of_query, of_key, value, causal, lagged)


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
