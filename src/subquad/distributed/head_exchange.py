"""Attention split by heads while it runs: each rank receives all tokens of its share of the heads.

Jacobs et al. 2023, "DeepSpeed Ulysses". Each rank sends its part of each head to the rank that runs that head, and
afterwards what came out goes back:

    tokens of rank r, all heads   →   all tokens, heads of rank r   →   the method   →   tokens of rank r, all heads
"""

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from subquad.distributed.shares import even_shares, spans
from subquad.distributed.together import exchange_together
from subquad.distributed.token_split import TokenSplit
from subquad.methods.core.head_subset import Heads


def of_rank(rank: int, ranks: int, heads: int, kv_heads: int) -> Heads:
    """The heads that a rank runs."""
    share = head_shares(heads, ranks)[rank]
    return Heads(share, tuple(key_heads(share, heads // kv_heads)), heads, kv_heads)


def head_shares(heads: int, ranks: int) -> list[slice]:
    """The query heads of each rank; the last ranks have fewer, or none, where they do not divide."""
    return spans(even_shares(heads, ranks))


def key_heads(queries: slice, share: int) -> list[int]:
    """The key head of each of these query heads, `share` of which have the same one; each once if they divide evenly.

    If a rank has part of the query heads of a key head, every query head has a copy of its own.
    """
    each = [head // share for head in range(queries.start, queries.stop)]
    distinct = list(dict.fromkeys(each))
    even = all(each.count(head) * len(distinct) == len(each) for head in distinct)
    return distinct if even else each


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, split: TokenSplit, rows: Many[Tensor] = (), tokens: Many[Tensor] = ()
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """All tokens of this rank's heads, by one exchange: [query, key, value], the rows and the tokens.

    `rows` are (B|1,H|1,N,M), by query, and `tokens` (B,N,…), which all heads read.
    """
    H, G = query.shape[1], key.shape[1]
    every = [of_rank(rank, split.ranks, H, G) for rank in range(split.ranks)]
    by_head = [(query, 0), (key, 1), (value, 1), *((x, 0) for x in rows)]

    def picked(x: Tensor, side: int, heads: Heads) -> Tensor:
        if side == 0:
            return x if x.shape[1] != H else x[:, heads.queries]
        return x[:, list(heads.keys)]

    def shape(x: Tensor, side: int, rank: int) -> tuple[int, ...]:
        local = every[split.rank]
        heads = len(local.keys) if side else (x.shape[1] if x.shape[1] != H else local.count)
        return x.shape[0], heads, (split.key_lengths if side else split.lengths)[rank], x.shape[3]

    sent = [[*(picked(x, side, heads) for x, side in by_head), *tokens] for heads in every]
    shapes = [
        [*(shape(x, side, rank) for x, side in by_head), *((len(x), n, *x.shape[2:]) for x in tokens)]
        for rank, n in enumerate(split.lengths)
    ]
    received = exchange_together(sent, shapes, split.group)
    whole = [torch.cat(parts, dim=2 if n < len(by_head) else 1) for n, parts in enumerate(zip(*received, strict=True))]
    return whole[:3], whole[3 : len(by_head)], whole[len(by_head) :]


def to_tokens(outs: Many[Tensor], split: TokenSplit, heads: int) -> list[Tensor]:
    """This rank's tokens of all heads, from all tokens (B,h,N,…) of its heads, by one exchange."""
    shares, N = head_shares(heads, split.ranks), split.lengths[split.rank]
    sent = [[out[:, :, span] for out in outs] for span in spans(split.lengths)]
    shapes = [[(len(out), share.stop - share.start, N, *out.shape[3:]) for out in outs] for share in shares]
    received = exchange_together(sent, shapes, split.group)
    return [torch.cat(parts, dim=1) for parts in zip(*received, strict=True)]
