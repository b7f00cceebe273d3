"""Attention by features in compiled code, which computes in fp32."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, with_contiguous_rows
from subquad.ops.parts.features.op import feature_attention, features_backward, features_forward, products
from subquad.ops.precision import wide

PITCH = 16  # of the projections' rows, as in feature_state.hpp


@feature_attention.refusal("cpu")
def refusal(query: Tensor, *_: object, **__: object) -> str | None:
    """Why the compiled kernels cannot take this call; None where they can."""
    return interface.refusal(query)


@features_forward.on("cpu")
def forward(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """As `feature_attention`: (out, lse)."""
    call, (out, lse) = _described(x, passes=1), outputs
    interface.run("feature_forward", interface.FeatureForward(call.sizes, call.inputs, rows(out), pointer(lse)))


@features_backward.on("cpu")
def backward(gradients: tuple[Tensor, Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key, value and key_bias."""
    call, (grad_out, grad_lse), (out, lse), (*grads, of_bias) = _described(x, passes=3), x.grads, x.outputs, gradients
    grad_out = None if grad_out is None else with_contiguous_rows(grad_out)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    out, lse = with_contiguous_rows(out), lse.contiguous()
    # The kernel gives each key head its own; a bias that they share gets the sum.
    shared = x.key_bias is not None and x.key_bias.shape[1] < x.key.shape[1]
    of_heads = of_bias.new_empty(x.key.shape[:3]) if shared else of_bias
    interface.run(
        "feature_backward",
        interface.FeatureBackward(
            call.sizes,
            call.inputs,
            rows(out),
            interface.Rows() if grad_out is None else rows(grad_out),
            *(rows(grad) for grad in grads),
            pointer(lse),
            pointer(grad_lse),
            None if x.key_bias is None else pointer(of_heads),
        ),
    )
    if shared:
        of_bias.copy_(of_heads.sum(1, keepdim=True))


class _Call(NamedTuple):
    """A call's axes and inputs, and the tensors that hold these."""

    sizes: interface.Sizes
    inputs: interface.FeatureInputs
    held: list[Tensor | None]


def _described(x: Any, *, passes: int) -> _Call:
    shapes = SimpleNamespace(**{name: t.shape if isinstance(t, Tensor) else t for name, t in vars(x).items()})
    query, key, value = wide(x.query, x.key, x.value)
    (B, H, N, D), (_, G, M, C), E = query.shape, key.shape, value.shape[3]
    R = D if x.of_query is None else x.of_query.shape[1]
    sizes = interface.Sizes(B, H, G, N, M, D, E, R, C, 0, 0, interface.threads(passes * products(shapes)))
    if x.block < 0 or x.lag < 0 or (x.block > 0 and N != M):
        pattern = (x.block, x.lag)
        raise ValueError(f"feature_attention: a pattern of {pattern} does not go with {N} queries and {M} keys")
    interface.check("feature_attention", value=(value, query.dtype, (B, G, M, E)), key=(key, query.dtype, (B, G, M, C)))
    sides = [with_contiguous_rows(t) for t in (query, key, value)]
    maps = [_whole_rows(x.of_query), _whole_rows(x.of_key)]
    maps += [None if t is None else t.contiguous() for t in (x.feature_bias, x.key_bias)]
    between = (_between(t, axis) for t, axis in zip((*maps, x.key_bias), (0, 0, 0, 0, 1), strict=True))
    inputs = interface.FeatureInputs(*(rows(t) for t in sides), *(pointer(t) for t in maps), *between, x.block, x.lag)
    return _Call(sizes, inputs, [*sides, *maps])


def _whole_rows(of_side: Tensor | None) -> Tensor | None:
    """Rows of whole vectors, filled up with zeros."""
    return None if of_side is None else F.pad(of_side, (0, -of_side.shape[2] % PITCH)).contiguous()


def _between(x: Tensor | None, axis: int) -> int:
    """Elements from one of the axis to the next, of a contiguous tensor; 0 where one serves all."""
    return 0 if x is None or x.shape[axis] == 1 else x.shape[axis + 1 :].numel()
