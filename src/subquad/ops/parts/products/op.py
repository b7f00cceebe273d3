"""The op `causal_product`: linear attention before any normalisation. Its gradients are causal products again."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.ops.backends import Op, Operator
from subquad.ops.parts.products import reference
from subquad.ops.tensors import token_major

TILE = 64  # tokens that compiled kernels take at a time


@Op
def causal_product(
    query: Float[Tensor, "B H N R"], key: Float[Tensor, "B G N R"], value: Float[Tensor, "B G N E"]
) -> Float[Tensor, "B H N E"]:
    """Each query's products with the keys so far, times their values, summed:

        out_t = Σ_{i≤t} (q_t·k_i) v_i

    Signed and not normalised. O(N·R·E) time. Inputs are fp32 or fp64; key head ⌊h·G/H⌋ serves query head h.

    The gradient is the same operation. With g = ∂L/∂out and x̃ for a sequence that runs backwards,

        dq = causal_product(g, v, k),   dk = (causal_product(ṽ, g̃, q̃))~,   dv = (causal_product(k̃, q̃, g̃))~

    summed over the query heads of a key head.

    >>> import torch
    >>> ones = torch.ones(1, 1, 4, 1)
    >>> causal_product(ones, ones, torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1)).flatten()
    tensor([ 1.,  3.,  6., 10.])
    """
    return reference.causal_product(query, key, value)


@causal_product.compiled
def _(backend: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return directed_product(backend, query, key, value, False)


@Operator
def directed_product(query: Tensor, key: Tensor, value: Tensor, reverse: bool) -> Tensor:
    """Allocate the sums over i ≤ t, or i ≥ t. With more key heads, each query head has the sum of several."""
    return token_major(query, value.shape[3])


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.backend, *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):  # type: ignore[no-untyped-def]
    query, key, value = ctx.saved_tensors
    _, of_query, of_key, of_value, _ = ctx.needs_input_grad
    backend, forwards, backwards = ctx.backend, ctx.reverse, not ctx.reverse
    return (
        None,
        directed_product(backend, grad, value, key, forwards) if of_query else None,
        directed_product(backend, value, grad, query, backwards) if of_key else None,
        directed_product(backend, key, query, grad, backwards) if of_value else None,
        None,
    )


directed_product.gradient(_differentiate, _save)


def refusal_of_dtype(query: Tensor) -> str | None:
    """Why compiled kernels cannot take numbers of this kind; None where they can."""
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
def _(x: Any) -> int:
    """Operations of the products."""
    return 2 * multiplications(x)
