"""Windows as buckets: blocks of queries, and the keys that are near them."""

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.core.rounding import ceil_div
from subquad.core.versions import sym_max, sym_min
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask

BLOCK = 16  # the fewest queries of a block: smaller ones would share too few keys


def farthest(N: int, M: int, mask: Mask) -> int:
    """The largest distance of a query and a key; if offsets are on a device, queries count as aligned with keys."""
    # torch's own minima and maxima, here and below: they can be traced where lengths are symbolic.
    return M + N if isinstance(mask.offset, Tensor) else sym_max((mask.offset or 0) + N, M) - 1


def reach(window: int, N: int, M: int, mask: Mask) -> int:
    """The distance that a query sees: the window or the mask's own, and no further than there are tokens."""
    span = window if mask.span is None else sym_min(window, mask.span)
    return span if isinstance(mask.offset, Tensor) else sym_min(span, farthest(N, M, mask))


def neighbours(
    query: Float[Tensor, "B H N D"], key: Float[Tensor, "B G M D"], window: int, mask: Mask, dilation: int = 1
) -> Buckets:
    """Blocks of queries that follow each other, each with the run of keys that reaches from the first one's window to
    the last one's. Padding is left out.

    With a dilation tokens meet whose distance is a multiple of it, `window` of them to each side, so that blocks and
    runs consist of such tokens too:

        dilation 2     queries  0 2 4 6 | 1 3 5 7 | 8 10 …     keys  0 2 4 6 8 | 1 3 5 7 9 | 4 6 8 10 …
    """
    (B, H, N, _), M, device = query.shape, key.shape[2], query.device
    span = reach(window * dilation, N, M, mask)
    steps = span // dilation
    members = ceil_div(N, dilation)
    size = sym_min(members, sym_max(steps, BLOCK))
    starts = size * dilation * torch.arange(ceil_div(members, size), device=device)[:, None]
    starts = (starts + torch.arange(sym_min(dilation, N), device=device)).view(1, 1, -1, 1)
    queries = (starts + dilation * torch.arange(size, device=device)).clamp(max=N)
    width = sym_min(size + steps if mask.is_causal else size + 2 * steps, ceil_div(M, dilation))
    # Shifted to where there are keys: a run that begins before the first key, or ends behind the last, reads no less.
    first = mask.positions(starts) - dilation * steps
    least = first % dilation
    most = least + dilation * ((M - 1 - least).div(dilation, rounding_mode="floor") + 1 - width).clamp(min=0)
    keys = first.maximum(least).minimum(most) + dilation * torch.arange(width, device=device)
    queries, keys = (x.expand(B, H, -1, -1) for x in (queries, keys.clamp(max=M)))
    return Buckets(queries, keys, span=span).of_valid(mask.query_padding(N), mask.key_padding(M))
