"""Balanced selection in plain PyTorch."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.tensors import one_hot


def top_of_each_bucket(
    scores: Float[Tensor, "B H N C"],
    sizes: Int64[Tensor, "B"],
    most: int,
    valid: Bool[Tensor, "B N"] | None,
    *,
    odds: bool,
) -> Int64[Tensor, "B H C K"]:
    """The slots of `subquad.kernels.selection.top.op.top_and_best`."""
    N = scores.shape[2]
    ranked = (log_odds(scores) if odds else scores).detach().transpose(-1, -2)
    if valid is not None:
        ranked = ranked.masked_fill(~valid[:, None, None, :], -torch.inf)
    values, order = (x[..., :most] for x in ranked.sort(dim=-1, descending=True, stable=True))
    taken = torch.arange(order.shape[3], device=scores.device) < sizes[:, None, None, None]
    return torch.where(taken & ~torch.isneginf(values), order, N).sort(-1).values


def log_odds(logits: Float[Tensor, "B H N C"]) -> Float[Tensor, "B H N C"]:
    """ln(p/(1 − p)) of p = softmax(logits): orders tokens within a bucket as p does, without saturating at p = 1."""
    total = logits.logsumexp(-1, keepdim=True)
    largest = one_hot(logits.argmax(-1), logits.shape[-1])
    logsumexp_of_others = logits.masked_fill(largest, -torch.inf).logsumexp(-1, keepdim=True)
    others = torch.where(largest, logsumexp_of_others, total + torch.log1p(-(logits - total).exp().clamp(max=0.5)))
    return logits - others
