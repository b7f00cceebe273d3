"""Slow and obvious: the attention that every exact limit is held against, and the inputs that tests share."""

from typing import Any

import torch
from torch import Tensor

from subquad.methods import Method


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ + bias) v over the allowed keys; 0 for a query that may see none."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits if bias is None else logits + bias
    logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0) @ v


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that leave the global generator alone, the same ones on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def integers(below: int, *shape: int, seed: int = 0) -> Tensor:
    """Whole numbers from 0 to below `below`, the same ones on every device."""
    drawn = torch.randint(below, shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def qkv(
    N: int = 24,
    M: int | None = None,
    *,
    B: int = 2,
    H: int = 2,
    G: int | None = None,
    D: int = 8,
    E: int = 6,
    **kind: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """A query, key and value; E ≠ D unless a test sets them equal."""
    M, G, seed = N if M is None else M, H if G is None else G, kind.pop("seed", 0)
    shapes = (B, H, N, D), (B, G, M, D), (B, G, M, E)
    query, key, value = (normal(*shape, seed=3 * seed + i, **kind) for i, shape in enumerate(shapes))
    return query, key, value


def hidden_for(method: Method, query: Tensor) -> dict[str, Tensor]:
    """An input of the layer for methods that read it, {"hidden": (B,N,H·D)}: the heads of the query side by side."""
    return {"hidden": query.transpose(1, 2).flatten(2)} if method.traits.needs_hidden else {}


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Gradients of a loss that weighs every output differently; 0 where an input is not read."""
    loss = (out.double() * normal(*out.shape, seed=99).double()).sum()
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]


def tracked(*inputs: Tensor) -> list[Tensor]:
    """Copies that record gradients."""
    return [x.detach().clone().requires_grad_() for x in inputs]
