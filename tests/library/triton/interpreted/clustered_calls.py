"""Calls of the two clustered ops with labels that are fixed, so that backends can be compared."""

import torch
from torch import Tensor

import subquad as sq
from subquad.kernels.attention.clustered.op import clustered_attention
from subquad.kernels.attention.tail.op import attend_with_tail
from subquad.testing.oracle import normal, tracked

Sizes = dict[str, int]


def labelled(B: int, H: int, N: int, groups: int, none: bool) -> Tensor:
    """Labels that go round, with one group empty, and some tokens in `none` or in the first group."""
    labels = (torch.arange(N) * 7 % (groups + 1)).expand(B, H, N)
    return torch.where((labels == 2) | (labels == groups), groups if none else 0, labels).contiguous()


def both(call: str, backend: str, q: Tensor, k: Tensor, v: Tensor, valid: tuple, **sizes: int) -> list[Tensor]:
    """Output, lse and the gradients of a loss that reads both."""
    inputs = tracked(q, k, v)
    (B, H, N, _), (_, G, M, _) = q.shape, k.shape
    labels = labelled(B, H, N, sizes["clusters"], call != "clustered")
    others = {}
    if call == "tail of others":
        spread = normal(B, H, q.shape[3], q.shape[3], seed=5)
        others = {"means": normal(B, H, sizes["clusters"], q.shape[3], seed=4).to(q.dtype).float().requires_grad_()}
        inputs, others["around"] = [*inputs, others["means"]], spread @ spread.mT / q.shape[3]
    with sq.use_backend(backend):
        if call != "clustered":
            labels = labels if valid[0] is None else labels.masked_fill(~valid[0][:, None], sizes["clusters"])
            cell = labelled(B, G, M, sizes["cells"], True)
            cell = cell if valid[1] is None else cell.masked_fill(~valid[1][:, None], sizes["cells"])
            out, lse = attend_with_tail(*inputs[:3], labels, cell, None, **sizes, **others, scale=0.4)
        else:
            how = {"bits": 8, "iterations": 1, "scale": 0.4, "seed": 0, "wants_lse": True}
            out, lse = clustered_attention(*inputs, *valid, **sizes, **how, labels=labels)
    seen = torch.where(lse.isneginf(), 0.0, lse)
    loss = (out * normal(*out.shape, seed=8)).sum() + seen.square().sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]
