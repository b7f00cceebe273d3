"""Windows as buckets: blocks of queries, and the keys that are near them."""

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.masks import Mask
from subquad.ops.slots import Buckets

BLOCK = 16  # the fewest queries of a block: smaller ones would share too few keys


def reach(window: int, N: int, M: int, mask: Mask) -> int:
    """How far a query sees: the window or the mask's own, and no further than there are tokens."""
    # torch's own minima and maxima, here and below: they can be traced where lengths are symbolic.
    span = window if mask.span is None else torch.sym_min(window, mask.span)
    if isinstance(mask.offset, Tensor):
        return span
    return torch.sym_min(span, torch.sym_max((mask.offset or 0) + N, M) - 1)


def neighbours(query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], window: int, mask: Mask) -> Buckets:
    """Blocks of queries that follow each other, each with the run of keys that reaches from the first one's window to
    the last one's. Padding is left out.
    """
    (B, H, N, _), M, device = query.shape, key.shape[2], query.device
    span = reach(window, N, M, mask)
    size = torch.sym_min(N, torch.sym_max(span, BLOCK))
    blocks = -(-N // size)
    queries = torch.arange(blocks * size, device=device).view(1, 1, blocks, size).clamp(max=N)
    width = torch.sym_min(size + span if mask.is_causal else size + 2 * span, M)
    # Shifted to where there are keys: a run that begins before the first key, or ends behind the last, reads no less.
    first = (mask.positions(queries[..., :1]) - span).clamp(0, M - width)
    keys = first + torch.arange(width, device=device)
    queries, keys = (x.expand(B, H, -1, -1) for x in (queries, keys))
    return Buckets(queries, keys, span=span).of_real(mask.query_padding(N), mask.key_padding(M))
