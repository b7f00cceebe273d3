"""Linformer over ranks: each projects its own keys, and sums over ranks are the projections."""

import torch
from torch import Tensor

from subquad.distributed.rows import combine_together, of_earlier
from subquad.distributed.strategies import Strategy, register
from subquad.distributed.together import add_together
from subquad.distributed.token_split import TokenSplit
from subquad.distributed.tokens.global_index import GlobalIndex, global_indices, pool_sums
from subquad.kernels.attention.projections import Projections, Shares
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.pools import pool_sizes
from subquad.kernels.tokens.positions import ValidPositions
from subquad.methods.core.call import Call, Partial
from subquad.methods.linformer import Linformer, Past, attend_to_summary, causal_linformer, with_ends


def attend(method: Linformer, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit) -> Partial:
    """Project keys and values, and attend to the projections."""
    query, key, value = upcast(query, key, value)
    return (attend_causal if call.mask.is_causal else attend_whole)(method, query, key, value, call, split)


def attend_causal(
    method: Linformer, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    """Under a causal mask: the ranks before this one leave a state behind, from which this one goes on."""
    line, skip = ValidPositions.from_mask(call.mask, query, key), int(method.ends == "exact")
    learned = method.projections(call, split.tokens)
    past = past_of_ranks(query, key, value, call, learned, skip, split)
    return causal_linformer(query, key, value, line.valid_keys, call, learned, skip, past)[:2]


def attend_whole(
    method: Linformer, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit
) -> Partial:
    """Without a causal mask: each rank projects its own keys, and sums over ranks are the projections."""
    skip, pooled = int(method.ends == "exact"), method.projection == "mean-pool"
    _, side = global_indices(call.mask, query, key, split)
    learned = None if pooled else method.projections(call, split.sizes[1])
    if learned is None:
        sums = [pool_sums(x, side, method.k, skip) for x in (key, value)]
    else:
        sums = local_sums(key, value, side, learned, skip)
    ends = [side.ends(x, skip) for x in (key, value)]
    *ends, keys, values = add_together([*ends, *sums], split.group)
    tokens = side.tokens[:, None]
    if learned is None:
        sizes = pool_sizes((side.tokens - 2 * skip).clamp(min=0), method.k)[:, None]
        shares = Shares(
            sizes > 0, 1 / sizes.clamp(min=1).to(key.dtype), sizes.clamp(min=1).to(key.dtype).log()[:, None]
        )
    else:
        shares = learned.shares(skip, tokens - skip, key.dtype)
    if shares.factor is not None:
        keys, values = (x * shares.factor[:, 0, :, None][:, None] for x in (keys, values))
    if skip:
        keys, values = torch.cat([ends[0], keys], dim=2), torch.cat([ends[1], values], dim=2)
        shares = with_ends(shares, tokens)
    return attend_to_summary(query, keys, values, shares, call)


def local_sums(key: Tensor, value: Tensor, side: GlobalIndex, learned: Projections, skip: int) -> list[Tensor]:
    """Contributions of this rank's tokens to the projected keys and values, without `skip` at each end of the item."""
    inside = side.valid & (side.index >= skip) & (side.index < side.tokens[:, None] - skip)
    return [e.mT @ x for e, x in zip(learned.columns(side.index, inside, key), (key, value), strict=True)]


def past_of_ranks(
    query: Tensor, key: Tensor, value: Tensor, call: Call, learned: Projections, skip: int, split: TokenSplit
) -> Past:
    """The state that the tokens of the ranks before this one leave behind, by one exchange of k·(D + E) numbers."""
    _, side = global_indices(call.mask, query, key, split)
    columns = learned.columns(side.index, side.valid & (side.index >= skip), key)
    sums = [e.mT @ x for e, x in zip(columns, (key, value), strict=True)]
    rows = [torch.cat([side.ends(x, 1)[:, :, :1], y], dim=2) for x, y in zip((key, value), sums, strict=True)]
    (earlier,) = combine_together([of_earlier(torch.cat(rows, dim=3))], split.group)
    keys, values = earlier.split([key.shape[3], value.shape[3]], dim=3)
    return Past(side.before, keys[:, :, 1:], values[:, :, 1:], keys[:, :, :1], values[:, :, :1])


register(Linformer, Strategy(kind="partials", attend=attend))
