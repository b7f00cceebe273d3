"""The loss of methods whose outputs have a gradient to all of their learned parameters."""

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.methods.core.exact import sdpa
from subquad.methods.core.method import Call, Method, upcast


def output_error(
    method: Method,
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    call: Call,
    *,
    of_mean: float = 0.0,
) -> Float[Tensor, ""]:
    """A `fit_loss`: the error of a method's outputs relative to exact attention under the same mask.

        mean over items of Σ‖o − o*‖² / Σ‖o*‖²          sums over the item's heads and real queries

    Args:
        of_mean: weight of the same of the outputs' means over the queries. An error that all tokens share is small in
            each output and does not average out, neither in an embedding nor over the layers.

    The gradient reaches the learned parameters alone. An item without a real query, or with values of 0, counts 0.
    """
    query, key, value = upcast(query.detach(), key.detach(), value.detach())
    valid = call.mask.query_padding(query.shape[2])
    with torch.no_grad():
        wanted = sdpa(query, key, value, call)
        wanted = wanted if valid is None else wanted.masked_fill(~valid[:, None, :, None], 0.0)
    apart = method.run(query, key, value, call) - wanted
    loss = _share(apart, wanted)
    return loss + of_mean * _share(apart.sum(2), wanted.sum(2)) if of_mean else loss


def _share(apart: Tensor, wanted: Tensor) -> Tensor:
    """The mean over items of Σ apart² / Σ wanted²."""
    error, size = (x.square().flatten(1).sum(1) for x in (apart, wanted))
    return torch.where(size > 0, error / size.where(size > 0, 1.0), 0.0).mean()
