"""Exact attention over ranks, in a ring."""

from torch import Tensor

from subquad.distributed.attention.blockwise import ring_attention
from subquad.distributed.strategies import Strategy, register
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.tokens.heads import repeat_heads
from subquad.methods.core.call import Call, Partial
from subquad.methods.full import Full
from subquad.methods.shared_full import SharedFull


def attend(method: Full, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit) -> Partial:
    """Exact attention to the keys of all ranks."""
    return ring_attention(query, key, value, call.mask, split, scale=call.scale)


def attend_shared(
    method: SharedFull, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    """Exact attention to the queries of all ranks."""
    return ring_attention(query, query, repeat_heads(value, query.shape[1]), call.mask, split, scale=call.scale)


# A ring does not know the terms of relative positions.
register(Full, Strategy(kind="ring", attend=attend, fits=lambda method: method.positions == "none"))
register(SharedFull, Strategy(kind="ring", attend=attend_shared))
