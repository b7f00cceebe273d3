"""Causal products in compiled code. Their gradients are causal products again, to any order."""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.ops.native import interface
from subquad.ops.native.interface import rows, token_major, with_contiguous_rows

TILE = 64  # as in feature_state.hpp


def refusal(query: Tensor) -> str | None:
    """Why the compiled kernels cannot take this call; None where they can."""
    if query.dtype in (torch.bfloat16, torch.float16):
        return f"the dtype is {query.dtype}, and causal products take fp32"
    return interface.refusal(query)


def causal_product(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As `subquad.ops.causal_product.causal_product`."""
    return _product(query, key, value, False)


@torch.library.custom_op("subquad::causal_product", mutates_args=(), device_types="cpu")
def _product(query: Tensor, key: Tensor, value: Tensor, reverse: bool) -> Tensor:
    """The sums over i ≤ t, or i ≥ t. Where there are more key heads, each query head has the sum of several."""
    out = token_major(query, value.shape[3])
    B, H, N, R = query.shape
    G, E = value.shape[1], value.shape[3]
    threads = interface.threads(_products(query.shape, key.shape, value.shape))
    sizes = interface.Sizes(B, H, G, N, N, R, E, 0, 0, 0, 0, threads)
    query, key, value = (with_contiguous_rows(x) for x in (query, key, value))
    interface.run(
        "causal_product", interface.CausalProduct(sizes, *(rows(x) for x in (query, key, value, out)), reverse)
    )
    return out


@_product.register_fake
def _(query, key, value, reverse):  # type: ignore[no-untyped-def]
    return token_major(query, value.shape[3])


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):  # type: ignore[no-untyped-def]
    query, key, value = ctx.saved_tensors
    of_query, of_key, of_value, _ = ctx.needs_input_grad
    forwards, backwards = ctx.reverse, not ctx.reverse
    return (
        _product(grad, value, key, forwards) if of_query else None,
        _product(value, grad, query, backwards) if of_key else None,
        _product(key, query, grad, backwards) if of_value else None,
        None,
    )


_product.register_autograd(_differentiate, setup_context=_save)


def _products(query, key, value) -> int:  # type: ignore[no-untyped-def]
    """Multiplications, by shapes: reads and states, and pairs inside a tile."""
    (B, H, N, R), (_, G, _, _), (*_, E) = query, key, value
    return B * N * ((H + G) * R * E + max(H, G) * TILE * (R + E))


@register_flop_formula([torch.ops.subquad.causal_product])
def _flops(query, key, value, reverse, **_):  # type: ignore[no-untyped-def]
    """Operations of the products, as torch's `FlopCounterMode` counts them."""
    return 2 * _products(query, key, value)
