"""Causal attention by halves as one operator of a compiled graph.

The number of rectangles depends on the length. Traced one by one, they would make one program for each length, and a
model of 30 layers would be compiled for minutes. As an operator, one program serves all lengths, and the outputs are
those of eager code bit for bit. It has no gradient: calls that need one are traced, and so is what
`torch.export` exports.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from subquad.core.torch_ops import define
from subquad.kernels.tensors import token_major
from subquad.kernels.transforms import transform
from subquad.masks import Mask
from subquad.methods.core.call import Call, Partial
from subquad.methods.core.checks import without_autocast


def is_one_operator(query: Tensor, key: Tensor, value: Tensor, call: Call) -> bool:
    """True if torch.compile traces this call and the operator can compute it."""
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    differentiated = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    plain = call.mask.span is None and not call.mask.ids and not call.mask.allowed
    whole = call.learned is None and call.rotary is None and call.heads is None and call.item is None
    return query.is_cpu and plain and whole and not differentiated and not call.dropout_p and transform() is None


def attend_as_operator(method: str, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Partial:
    """Attention by this registered method under a causal mask, as the operator."""
    mask, offset = call.mask, call.mask.offset
    padding = mask.query_padding(query.shape[2]), mask.key_padding(key.shape[2])
    offsets = (offset, 0) if isinstance(offset, Tensor) else (None, offset or 0)
    out, lse = _OPERATOR(query, key, value, *padding, *offsets, call.scale, call.seed, method, call.wants_lse)
    return out, lse if call.wants_lse else None


def _empty(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid_queries: Tensor | None,
    valid_keys: Tensor | None,
    offsets: Tensor | None,
    offset: int,
    scale: float,
    seed: int,
    method: str,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Allocate out, in fp32 or fp64 if it is to be merged with others, and lse, which is empty if nobody wants it."""
    upcast = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty(query.shape[:3] if wants_lse else (0,), dtype=upcast)
    return token_major(query, value.shape[3], upcast if wants_lse else query.dtype), lse


def _compute(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    valid_queries, valid_keys, offsets, offset, scale, seed, method, wants_lse = others
    mask = Mask.causal(offset if offsets is None else offsets)
    if valid_queries is not None or valid_keys is not None:
        mask = mask & Mask.padding(queries=valid_queries, keys=valid_keys)
    call = Call(mask, None, scale, 0.0, seed, wants_lse=wants_lse)
    with torch.no_grad(), without_autocast(query.device.type):  # the caller's contexts are not those of the graph
        partial = _method(method).attend_causally(query, key, value, call)
    out, lse = _empty(query, key, value, *others)
    out.copy_(partial[0])
    if wants_lse:
        lse.copy_(partial[1])
    return out, lse


@cache
def _method(text: str) -> Any:
    from subquad.methods.core.names import parse_method  # which imports the methods, and they import this

    return parse_method(text)


_OPERATOR = define("attend_by_halves", _compute, _empty)
