"""Clustered and improved clustered attention in compiled code: one op a direction for the whole method.

The maths is that of `subquad.methods.clustered` and `subquad.methods.i_clustered`, which stay the reference;
`topk = 0` is "clustered". The gradient flows through the same paths; it is itself not differentiable.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.masks import Mask
from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, token_major, with_contiguous_rows
from subquad.randomness import orthogonal


def refusal(query: Tensor, dropout_p: float) -> str | None:
    """Why the compiled kernels cannot take this call; None where they can."""
    if dropout_p > 0:
        return f"dropout_p={dropout_p}, and the kernels have no dropout"
    return interface.refusal(query)


def clustered_attention(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    mask: Mask,
    *,
    clusters: int,
    topk: int,
    bits: int,
    iterations: int,
    scale: float,
    seed: int,
) -> Float[Tensor, "B H N E"]:
    """Attention by at most `clusters` centroids, each with `topk` keys done exactly for its members; padding gets 0.

    Inputs share a dtype, fp32, bf16 or fp16, and are on the CPU; the mask is padding alone. The C×M weights of the
    centroids are never stored.
    """
    N, M = query.shape[2], key.shape[2]
    real = mask.query_padding(N), mask.key_padding(M)
    return _forward(query, key, value, *real, clusters, torch.sym_min(topk, M), bits, iterations, scale, seed)[0]


@torch.library.custom_op("subquad::clustered_forward", mutates_args=(), device_types="cpu")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_real: Tensor | None,
    key_real: Tensor | None,
    clusters: int,
    topk: int,
    bits: int,
    iterations: int,
    scale: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and all that `Saved` holds, in its order."""
    _check("clustered_forward", query, key, value, query_real, key_real, clusters, topk)
    query, key, value = (with_contiguous_rows(x) for x in (query, key, value))
    query_real, key_real = (None if x is None else x.contiguous() for x in (query_real, key_real))
    planes = orthogonal(seed, bits, query.shape[3], like=interface.FLOAT32)
    out, *saved = _outputs(query, key, value, clusters, topk)
    interface.run(
        "forward",
        interface.Forward(
            interface.sizes(query, key, value, clusters=clusters, topk=topk, iterations=iterations),
            *(rows(x) for x in (query, key, value, out)),
            pointer(query_real),
            pointer(key_real),
            pointer(planes),
            bits,
            scale,
            interface.Saved(*(pointer(x) for x in saved)),
        ),
    )
    return out, *saved  # type: ignore[return-value]


@_forward.register_fake
def _(query, key, value, query_real, key_real, clusters, topk, bits, iterations, scale, seed):  # type: ignore[no-untyped-def]
    return _outputs(query, key, value, clusters, topk)


def _outputs(query: Tensor, key: Tensor, value: Tensor, clusters: int, topk: int) -> tuple[Tensor, ...]:
    B, H, N, D = query.shape
    E, C = value.shape[3], clusters
    positions = query.new_empty(B, H, N, dtype=torch.int32)
    offsets = query.new_empty(B, H, C + 1, dtype=torch.int32)
    top = query.new_empty(B, H, C, topk, dtype=torch.int32)
    centroids, rest, lse, mass = (
        query.new_empty(B, H, C, *width, dtype=torch.float32) for width in ((D,), (E,), (), ())
    )
    return token_major(query, E), positions, offsets, top, centroids, rest, lse, mass


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    query, key, value, query_real, key_real, clusters, topk, _, _, scale, _ = inputs
    _, *saved = output
    ctx.save_for_backward(query, key, value, query_real, key_real, *saved)
    ctx.clusters, ctx.topk, ctx.scale = clusters, topk, scale
    ctx.set_materialize_grads(False)  # else zeros are made for the seven outputs that nobody differentiates


def _differentiate(ctx, grad_out, *_):  # type: ignore[no-untyped-def]
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if grad_out is not None:
        grads = _backward(grad_out, *ctx.saved_tensors, ctx.clusters, ctx.topk, ctx.scale)
    return *grads, *(None,) * 8


_forward.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("subquad::clustered_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_real: Tensor | None,
    key_real: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    top: Tensor,
    centroids: Tensor,
    rest: Tensor,
    lse: Tensor,
    mass: Tensor,
    clusters: int,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value.

    Raises:
        ValueError: `order`, `offsets` and `top` hold numbers that the forward pass cannot have made.
    """
    _check("clustered_backward", query, key, value, query_real, key_real, clusters, topk)
    (B, H, N, D), E, C = query.shape, value.shape[3], clusters
    interface.check(
        "clustered_backward",
        grad_out=(grad_out, query.dtype, (B, H, N, E)),
        order=(order, torch.int32, (B, H, N)),
        offsets=(offsets, torch.int32, (B, H, C + 1)),
        top=(top, torch.int32, (B, H, C, topk)),
        centroids=(centroids, torch.float32, (B, H, C, D)),
        rest=(rest, torch.float32, (B, H, C, E)),
        lse=(lse, torch.float32, (B, H, C)),
        mass=(mass, torch.float32, (B, H, C)),
    )
    grads = _gradients(query, key, value)
    grad_out, query, key, value = (with_contiguous_rows(x) for x in (grad_out, query, key, value))
    query_real, key_real = (None if x is None else x.contiguous() for x in (query_real, key_real))
    saved = [x.contiguous() for x in (order, offsets, top, centroids, rest, lse, mass)]
    interface.run(
        "backward",
        interface.Backward(
            interface.sizes(query, key, value, clusters=clusters, topk=topk, iterations=0),
            *(rows(x) for x in (query, key, value, grad_out, *grads)),
            pointer(query_real),
            pointer(key_real),
            scale,
            interface.Saved(*(pointer(x) for x in saved)),
        ),
    )
    return grads


def _check(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_real: Tensor | None,
    key_real: Tensor | None,
    clusters: int,
    topk: int,
) -> None:
    (B, _, N, D), (_, G, M, E) = query.shape, value.shape
    if topk < 0 or clusters < min(N, 1):
        raise ValueError(f"{op}: clusters={clusters} and topk={topk}, but there must be 1 and 0 at least")
    interface.check(
        op,
        key=(key, query.dtype, (B, G, M, D)),
        value=(value, query.dtype, (B, G, M, E)),
        query_real=(query_real, torch.bool, (B, N)),
        key_real=(key_real, torch.bool, (B, M)),
    )


@_backward.register_fake
def _(grad_out, query, key, value, *_):  # type: ignore[no-untyped-def]
    return _gradients(query, key, value)


def _gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty, token-major as the projections before an attention are, so that their gradients need no copy."""
    return token_major(query, query.shape[3]), token_major(key, key.shape[3]), token_major(value, value.shape[3])


interface.not_differentiable(_backward, "clustered attention")


@register_flop_formula([torch.ops.subquad.clustered_forward])
def _forward_flops(query, key, value, query_real, key_real, clusters, topk, bits, *_, **__):  # type: ignore[no-untyped-def]
    """Operations of the products, as torch's `FlopCounterMode` counts them: hash, logits, weighted values."""
    B, H, N, D = query
    return 2 * B * H * N * D * bits + _pairs(query, value, clusters, topk) * (D + value[3])


@register_flop_formula([torch.ops.subquad.clustered_backward])
def _backward_flops(grad_out, query, key, value, *rest, **__):  # type: ignore[no-untyped-def]
    """The logits again and the gradients of both their sides; the gradients of weights and values."""
    *_, clusters, topk, _ = rest
    return _pairs(query, value, clusters, topk) * (3 * query[3] + 2 * value[3])


def _pairs(query, value, clusters: int, topk: int) -> int:  # type: ignore[no-untyped-def]
    """Twice the query-key pairs that are computed: of centroids with all keys, of queries with their top keys."""
    B, H, N, _ = query
    return 2 * B * H * (clusters * value[2] + N * topk)
