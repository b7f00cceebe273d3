"""Attention by features in compiled code: one op a direction. The gradient is itself not differentiable.

Lacking: the gradients of the projections, for which the reference runs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from subquad.ops.native import interface
from subquad.ops.native.interface import pointer, rows, token_major, with_contiguous_rows

PITCH = 16  # of the projections' rows, as in feature_state.hpp
TILE = 64  # as there


def refusal(query: Tensor, *others: Tensor | None) -> str | None:
    """Why the compiled kernels cannot take this call; None where they can."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, *others)):
        return "a gradient is required, which the kernels do not compute yet"
    if query.dtype in (torch.bfloat16, torch.float16):
        return f"the dtype is {query.dtype}, and attention by features takes fp32"
    return interface.refusal(query)


def feature_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_query: Tensor | None,
    of_key: Tensor | None,
    key_bias: Tensor | None,
    causal: bool,
    lagged: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    """As `subquad.ops.feature_attention.feature_attention`."""
    block, lag = (int(causal), 0) if lagged is None else lagged
    return _forward(query, key, value, of_query, of_key, key_bias, block, lag)


@torch.library.custom_op("subquad::feature_attention_forward", mutates_args=(), device_types="cpu")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    of_query: Tensor | None,
    of_key: Tensor | None,
    key_bias: Tensor | None,
    block: int,
    lag: int,
) -> tuple[Tensor, Tensor]:
    """(out, lse). block 0: every query sees every key; lag 0: causal."""
    query, key, value = (with_contiguous_rows(x) for x in (query, key, value))
    out, lse = _outputs(query, value)
    sides = _Sides(query, key, value, of_query, of_key, key_bias, block)
    interface.run(
        "feature_forward",
        interface.FeatureForward(
            sides.sizes, *(rows(x) for x in (query, key, value, out)), *sides.pointers, block, lag, pointer(lse)
        ),
    )
    return out, lse


@_forward.register_fake
def _(query, key, value, *_):  # type: ignore[no-untyped-def]
    return _outputs(query, value)


def _outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return token_major(query, value.shape[3]), query.new_empty(query.shape[:3])


class _Sides:
    """The axes of a call, and where its projections and key bias lie; owns what they point to."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        of_query: Tensor | None,
        of_key: Tensor | None,
        key_bias: Tensor | None,
        block: int,
    ) -> None:
        B, H, N, D = query.shape
        _, G, M, C = key.shape
        R = D if of_query is None else of_query.shape[1]
        E = value.shape[3]
        products = _products(query.shape, key.shape, value.shape, R, of_query is not None, of_key is not None, block)
        self.sizes = interface.Sizes(B, H, G, N, M, D, E, R, C, 0, 0, interface.threads(products))
        self.of_query, self.of_key = _whole_rows(of_query), _whole_rows(of_key)
        self.key_bias = None if key_bias is None else key_bias.contiguous()
        self.pointers = (
            pointer(self.of_query),
            pointer(self.of_key),
            _between_heads(self.of_query, 0),
            _between_heads(self.of_key, 0),
            pointer(self.key_bias),
            0 if self.key_bias is None else self.key_bias.stride(0),
            _between_heads(self.key_bias, 1),
        )


def _whole_rows(of_side: Tensor | None) -> Tensor | None:
    """Rows of whole vectors, filled up with zeros."""
    return None if of_side is None else F.pad(of_side, (0, -of_side.shape[2] % PITCH)).contiguous()


def _between_heads(x: Tensor | None, axis: int) -> int:
    return 0 if x is None or x.shape[axis] == 1 else x.stride(axis)


def _products(query, key, value, features, query_projected, key_projected, block):  # type: ignore[no-untyped-def]
    """Multiplications of the forward pass: exponents, state, reads, and pairs inside a tile."""
    (B, H, N, D), (_, G, M, C), (*_, E) = query, key, value
    of_query = B * H * N * features * (E + D * query_projected)
    of_key = B * G * M * features * (E + C * key_projected)
    return of_query + of_key + (B * H * N * TILE // 2 * (features + E) if block else 0)
