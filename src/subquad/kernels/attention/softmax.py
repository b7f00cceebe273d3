"""Softmax over visible keys, where a row may have none, and partials that merge."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def visible_softmax(logits: Float[Tensor, "*row K"], visible: Bool[Tensor, "..."] | None) -> Float[Tensor, "*row K"]:
    """Softmax over the visible entries of each row; a row without any is all 0, with gradient 0.

    Invisible entries are 0 also where the row is NaN. It is NaN where all its visible entries are −inf.
    """
    if visible is None:
        return logits.softmax(-1)
    # A row without visible entries is computed from finite ones, since −inf alone is NaN both ways.
    some = visible.any(-1, keepdim=True)
    hidden = torch.full_like(some, torch.finfo(logits.dtype).min, dtype=logits.dtype).masked_fill(some, -torch.inf)
    return torch.where(visible, logits, hidden).softmax(-1).masked_fill(~visible, 0.0)


def hide(logits: Float[Tensor, "*row K"], visible: Bool[Tensor, "..."] | None) -> Float[Tensor, "*row K"]:
    """Logits with the invisible ones at the dtype's minimum; finite, because −inf rows are NaN both ways."""
    return logits if visible is None else logits.masked_fill(~visible, torch.finfo(logits.dtype).min)


def merge_partials(
    partials: list[tuple[Float[Tensor, "*row E"], Float[Tensor, "*row"]]],
) -> tuple[Float[Tensor, "*row E"], Float[Tensor, "*row"]]:
    """Attention over the union of disjoint sets of keys: out = Σ_p e^{lse_p} out_p / Σ_p e^{lse_p}.

    A part that saw no key has out = 0 and lse = −inf and is skipped; so is one whose keys' logits are all
    −inf, with out = NaN, unless all parts are such.
    """
    outs = torch.stack([out for out, _ in partials])
    lses = torch.stack([lse for _, lse in partials])
    weights, lse = shares(lses)
    outs = outs.masked_fill((torch.isneginf(lses) & ~torch.isneginf(lse)).unsqueeze(-1), 0.0)
    return (weights.unsqueeze(-1) * outs).sum(0), lse


def shares(lses: Float[Tensor, "P *row"]) -> tuple[Float[Tensor, "P *row"], Float[Tensor, "*row"]]:
    """The share of each partial in the attention over the union of their keys, e^{lse_p} / Σ_p e^{lse_p}, and its lse.

    All shares of a row are 0 where no part saw a key.
    """
    # A constant; and 0 where no part saw a key, whose gradients would be NaN otherwise.
    largest = lses.detach().amax(0)
    largest = torch.where(torch.isneginf(largest), 0.0, largest)
    weights = (lses - largest).exp()
    total = weights.sum(0)
    present = total != 0  # NaN is there
    total = torch.where(present, total, 1.0)
    # From sums of its own: the gradient of `out` in its own sums, whose parts cancel each other, may be so large that
    # the log-sum-exp's disappears in rounding.
    apart = (lses - largest).exp().sum(0)
    lse = torch.where(present, torch.where(present, apart, 1.0).log() + largest, -torch.inf)
    return weights / total, lse  # the sum of what is not divided yet might overflow


def logsumexp(logits: Float[Tensor, "*row K"]) -> Float[Tensor, "*row"]:
    """ln Σ e^logit, whose gradient is the softmax itself.

    That of `torch.logsumexp` is e^{logit − lse} with an lse that is rounded: at logits of 1e6 it is off by 6 %.
    A row of −∞ alone, or of no logit, has −∞ and gradient 0.
    """
    if logits.shape[-1] == 0:
        return logits.sum(-1) - torch.inf
    largest = logits.detach().amax(-1, keepdim=True)
    largest = torch.where(largest.isinf(), 0.0, largest)
    total = (logits - largest).exp().sum(-1)
    none = total == 0
    lse = torch.where(none, 1.0, total).log() + largest.squeeze(-1)
    return torch.where(none, -torch.inf, lse)


def visible_logsumexp(logits: Float[Tensor, "*row K"], visible: Bool[Tensor, "..."] | None) -> Float[Tensor, "*row"]:
    """ln Σ e^logit over the visible entries of each row; −inf for a row without any, with gradient 0."""
    if visible is None:
        return logsumexp(logits)
    return logsumexp(hide(logits, visible)).masked_fill(~visible.any(-1), -torch.inf)
