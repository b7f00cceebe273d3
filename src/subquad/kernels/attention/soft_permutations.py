"""Soft permutations of blocks."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def sinkhorn(
    logits: Float[Tensor, "B H T T"], exists: Bool[Tensor, "B T"], iterations: int
) -> Float[Tensor, "B H T T"]:
    """Columns and rows of exp(logits) brought to sum 1 in turn, rows last, in log space (Sinkhorn 1964).

    Rows and columns that do not exist are 0 and are skipped. Every row that exists sums to 1, every column the
    more nearly the more iterations there were.
    """
    inside = exists[:, None, :, None] & exists[:, None, None, :]
    least = torch.finfo(logits.dtype).min  # finite: −inf rows are NaN both ways
    logits = logits.masked_fill(~inside, least)
    for _ in range(iterations):
        for axis in (-2, -1):
            logits = (logits - logits.logsumexp(axis, keepdim=True)).masked_fill(~inside, least)
    return torch.where(inside, logits, -torch.inf).exp()
