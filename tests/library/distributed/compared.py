"""Compare what several ranks compute with what one process computes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import subquad as sq

TOKENS = 23
UNEVEN = (5, 1, 3)


def split(tokens: int, *, uneven: bool = False, keys: int | None = None, mode: str = "auto") -> sq.distributed.Sequence:
    """A split of so many tokens: even, or with one token on the second rank."""
    ranks = dist.get_world_size()
    if not uneven:
        return sq.distributed.Sequence.even(tokens, keys=keys, mode=mode)
    own = UNEVEN[: ranks - 1]
    return sq.distributed.Sequence((*own, tokens - sum(own)), mode=mode)


def worst(outputs: list[tuple[Tensor, Tensor]], gradients: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of outputs, and of gradients, each relative to the largest of all of them."""
    return max(relative(outputs), relative(list(gradients)))


def relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    apart = max((float((want - have).detach().abs().max()) for want, have in pairs), default=0.0)
    return apart / max((float(want.detach().abs().max()) for want, _ in pairs), default=1.0)


def taken(model: nn.Module) -> list[Tensor]:
    """The gradients of the parameters, which are cleared."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return gradients


def of_parameters(gradients: list[Tensor], model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The gradients of one process, and those of its parts, added over ranks."""
    have = taken(model)
    for gradient in have:
        dist.all_reduce(gradient)
    return list(zip(gradients, have, strict=True))
