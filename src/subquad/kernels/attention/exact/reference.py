"""Exact attention with its log-sum-exp, by torch's own kernel."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from subquad.kernels.attention.blockwise.partial import fused_partial


def exact_partial(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    valid: Bool[Tensor, "B M"] | None,
    *,
    causal: bool,
    offset: int,
    scale: float,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Exact attention and its log-sum-exp in fp32 (fp64 for fp64 inputs): out_i = Σ_j e^{scale·q_i·k_j − lse_i} v_j.

    Args:
        valid: the keys that there are; None: all.
        causal: query i meets the keys up to i + `offset`.

    A query that meets no key has out 0 and lse −∞. The keys and values that a query does not meet change nothing, if
    those that are not valid are finite.
    """
    N, M = query.shape[2], key.shape[2]
    if valid is None and (not causal or offset == 0):
        return fused_partial(query, key, value, None, causal=causal, scale=scale)
    allowed = torch.ones(1, 1, 1, M, dtype=torch.bool, device=query.device) if valid is None else valid[:, None, None]
    if causal:
        allowed = allowed & torch.ones(N, M, dtype=torch.bool, device=query.device).tril(offset)
    return fused_partial(query, key, value, allowed, scale=scale)
