"""Partials of windows of queries, merged in plain PyTorch."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.kernels.attention.softmax import shares
from subquad.kernels.tokens.token_windows import TokenWindows


def merge_windows(
    outs: Sequence[Float[Tensor, "_ H _ E"]],
    lses: Sequence[Float[Tensor, "_ H _"]],
    windows: Sequence[TokenWindows],
    *,
    tokens: int,
    rounded: bool = False,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Attention over the union of disjoint sets of keys: out = Σ_p e^{lse_p − lse} out_p, lse = ln Σ_p e^{lse_p}.

    Part p is of some windows of the N = `tokens` queries of each item, (item, window) along the first axis; no query is
    in two windows of one part. A query for which no part saw a key has out 0 and lse −∞. Both come in fp32 or fp64; if
    `rounded`, out has the dtype of the parts.
    """
    count, H, E = len(outs[0]) // windows[0].count, outs[0].shape[1], outs[0].shape[3]
    of_parts = lses[0].new_full((len(windows), count, H, tokens), -torch.inf)
    for number, (lse, each) in enumerate(zip(lses, windows, strict=True)):
        each.view(of_parts[number]).copy_(_by_item(lse, each))
    weights, lse = shares(of_parts)
    total = lse.new_zeros(count, H, tokens, E)
    for weight, out, of_part, each in zip(weights, outs, lses, windows, strict=True):
        visible = out.masked_fill(torch.isneginf(of_part)[..., None], 0.0)
        each.view(total).addcmul_(_by_item(visible, each), each.view(weight)[..., None])
    return (total.to(outs[0].dtype) if rounded else total), lse


def _by_item(x: Tensor, windows: TokenWindows) -> Tensor:
    return x.unflatten(0, (-1, windows.count)).transpose(1, 2)
