"""The auxiliary losses of a model's attention layers: for parameters without a gradient, or for shorter spans."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from subquad.methods import BoundMethod
from subquad.methods.core.plugins import all_methods


def auxiliary_loss(model: nn.Module) -> Float[Tensor, ""]:
    """Return and clear the mean auxiliary loss of a model's layers in their last forward pass in training.

    A layer is any attention in the model that runs a method with such a loss: in `MultiheadAttention`, or put into a
    transformers model by `sq.hf.swap`. The mean is over the layers that ran.

    Raises:
        ValueError: no layer has an auxiliary loss, or none was computed since the last call: a forward pass in eval
            mode or without gradients computes none. The backward pass of gradient checkpointing does.

    Its gradient to everything but the parameters that it is for is exactly 0, and the task's gradient to those is,
    except for the spans of "adaptive-span", which the task lengthens and this loss shortens.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(32, 4, method="lha:buckets=4")
    >>> out = layer(torch.randn(2, 50, 32))
    >>> sq.nn.auxiliary_loss(layer).shape
    torch.Size([])
    """
    layers = [module for module in model.modules() if isinstance(module, BoundMethod)]
    losses = [loss for loss in (layer.auxiliary_loss() for layer in layers) if loss is not None]
    if not losses:
        raise ValueError(_why_none(model, layers))
    return torch.stack([loss.to(losses[0].device) for loss in losses]).mean()


def with_auxiliary_loss(task_loss: Float[Tensor, ""], model: nn.Module, weight: float = 0.05) -> Float[Tensor, ""]:
    """Combine losses: (1 − weight) · task_loss + weight · auxiliary_loss(model) (Sun, Yang, Yoo 2022, equation 19).

    Raises:
        TypeError: the task's loss is not a tensor.
        ValueError: a weight that is not in [0, 1], or a task's loss that is not a scalar; and as `auxiliary_loss`.

    >>> import torch, subquad as sq
    >>> layer = sq.nn.MultiheadAttention(32, 4, method="lha:buckets=4")
    >>> task_loss = layer(torch.randn(2, 50, 32)).square().mean()
    >>> sq.nn.with_auxiliary_loss(task_loss, layer).backward()
    """
    if not 0.0 <= weight <= 1.0:
        raise ValueError(f"weight={weight!r}, but it must be a number from 0 to 1: the auxiliary loss's share")
    if not isinstance(task_loss, Tensor):
        raise TypeError(f"task_loss is a {type(task_loss).__name__}, but it must be a tensor: omit .item()")
    if task_loss.ndim:
        raise ValueError(f"task_loss is {tuple(task_loss.shape)}, but it must be a scalar: call .mean() on it")
    auxiliary = auxiliary_loss(model)
    return (1 - weight) * task_loss + weight * auxiliary.to(task_loss.device)


def has_auxiliary_loss(model: nn.Module) -> bool:
    """True if any attention layer of a model has a method with an auxiliary loss."""
    return any(isinstance(module, BoundMethod) and module.method.has_auxiliary_loss for module in model.modules())


def _why_none(model: nn.Module, layers: list[BoundMethod]) -> str:
    """The reason why there is no auxiliary loss, and the remedy."""
    able = [layer for layer in layers if layer.method.has_auxiliary_loss]
    if not able:
        with_one = ", ".join(name for name, method in all_methods().items() if method().has_auxiliary_loss)
        return f"no attention layer of this {type(model).__name__} has an auxiliary loss; methods that do: {with_one}"
    waiting = sum(not layer.training for layer in able)
    where = f"{waiting} of its {len(able)} layers with one are in eval mode: call model.train()"
    return (
        f"no auxiliary loss was computed in this {type(model).__name__} since the last call: it takes a forward pass "
        f"in training mode, with gradients, for each call; {where if waiting else 'its layers are in training mode'}"
    )
