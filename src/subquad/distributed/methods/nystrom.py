"""Nyström attention over ranks: landmarks are means over the tokens of all of them."""

import torch
from jaxtyping import Float
from torch import Tensor

from subquad.distributed.attention.blockwise import exact_partial
from subquad.distributed.attention.merging import merge_of_ranks
from subquad.distributed.halo import Halo
from subquad.distributed.strategies import Strategy, register
from subquad.distributed.together import add_together
from subquad.distributed.token_split import TokenSplit
from subquad.distributed.tokens.global_index import global_indices, pool_sums
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.pools import pool_sizes
from subquad.methods.core.call import Call, Partial
from subquad.methods.core.exact import sdpa
from subquad.methods.nystrom import Nystrom, inverse_core, keys_only, valid_values


def attend(method: Nystrom, query: Tensor, key: Tensor, value: Tensor, call: Call, split: TokenSplit) -> Partial:
    """Attend through landmarks; the convolution takes the values near this rank's own from the neighbouring ranks."""
    query, key, value = upcast(query, key, value)
    out = nystrom_of_ranks(query, key, value, call, method.landmarks, method.iterations, split)
    if call.learned is None:
        return out, None
    halo = Halo.around(split, method.convolution // 2, (method.convolution - 1) // 2)
    (around,), _ = halo.exchange([(valid_values(value, call.mask), 2)], [])
    convolved = call.learned(around).narrow(2, halo.before, value.shape[2])
    return out + repeat_heads(convolved, query.shape[1]), None


def nystrom_of_ranks(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    call: Call,
    landmarks: int,
    iterations: int,
    split: TokenSplit,
) -> Float[Tensor, "B H N E"]:
    """`nystrom` of a split sequence: sums of the segments over all ranks, and B V from each rank's partial."""
    H = query.shape[1]
    sides = global_indices(call.mask, query, key, split)
    inputs = (query, sides[0]), (key, sides[1]), (value, sides[1])
    totals = add_together([pool_sums(x, side, landmarks) for x, side in inputs], split.group)
    sizes = [pool_sizes(side.tokens, landmarks) for side in sides]
    of_query, of_key, pooled = (
        total / size[:, None, :, None].clamp(min=1)
        for total, size in zip(totals, (sizes[0], sizes[1], sizes[1]), strict=True)
    )
    of_key, rows, columns = repeat_heads(of_key, H), sizes[0] > 0, sizes[1] > 0
    partial = exact_partial(of_query, key, value, keys_only(call.mask.key_padding(key.shape[2])), scale=call.scale)
    read, _ = merge_of_ranks(*partial, split)
    middle = inverse_core(of_query, rows, of_key, columns, call.scale, iterations) @ read
    few = sides[1].tokens <= landmarks
    middle = torch.where(few[:, None, None, None], repeat_heads(pooled, H), middle)
    return sdpa(query, of_key, middle, call.under(keys_only(columns)))


register(Nystrom, Strategy(kind="partials", attend=attend))
