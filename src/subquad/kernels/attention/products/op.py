"""The op `causal_product`: linear attention before any normalisation. Its gradients are causal products again."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.products import reference
from subquad.kernels.dispatch import Op
from subquad.kernels.tensors import token_major

TILE = 64  # tokens that compiled kernels take at a time


causal_product = Op(reference.causal_product)


@causal_product.compiled
def run(backend: str, x: Any) -> Tensor:
    """Run on a compiled backend."""
    out: Tensor = directed_product.run(backend, *x, False)
    return out


@causal_product.operator("query", "key", "value", "reverse", reverse=bool)
def directed_product(x: Any) -> Tensor:
    """Allocate the sums over i ≤ t, or i ≥ t. With more key heads, each query head has the sum of several."""
    return token_major(x.query, x.value.shape[3])


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.backend, *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):  # type: ignore[no-untyped-def]
    query, key, value = ctx.saved_tensors
    _, of_query, of_key, of_value, _ = ctx.needs_input_grad
    backend, forwards, backwards = ctx.backend, ctx.reverse, not ctx.reverse
    return (
        None,
        directed_product.run(backend, grad, value, key, forwards) if of_query else None,
        directed_product.run(backend, value, grad, query, backwards) if of_key else None,
        directed_product.run(backend, key, query, grad, backwards) if of_value else None,
        None,
    )


directed_product.gradient(_differentiate, _save)


def refusal_of_dtype(query: Tensor) -> str | None:
    """The reason why compiled kernels cannot take numbers of this kind; None if they can."""
    if query.dtype in (torch.bfloat16, torch.float16):
        return f"the dtype is {query.dtype}, and causal products take fp32"
    return None


def check_heads(x: Any) -> None:
    """Refuse numbers of heads that do not share."""
    H, G = x.query.shape[1], x.key.shape[1]
    if H % G and G % H:
        raise ValueError(f"causal_product: {H} query heads and {G} key heads, but one must divide the other")


def multiplications(x: Any) -> int:
    """Multiplications from the shapes: reads and states, and pairs inside a tile."""
    (B, H, N, R), (_, G, _, _), (*_, E) = x.query, x.key, x.value
    return B * N * ((H + G) * R * E + max(H, G) * TILE * (R + E))


@directed_product.flops
def product_flops(x: Any) -> int:
    """Operations of the products."""
    return 2 * multiplications(x)
