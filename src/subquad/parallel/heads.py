"""Attention split by heads while it runs: each rank receives all tokens of its share of the heads.

Jacobs et al. 2023, "DeepSpeed Ulysses". Each rank sends its part of each head to the rank that runs that head, and
afterwards what came out goes back:

    tokens of rank r, all heads   →   all tokens, heads of rank r   →   the method   →   tokens of rank r, all heads
"""

from collections.abc import Sequence as Parts

import torch
from torch import Tensor

from subquad.parallel.collectives import exchange
from subquad.parallel.sequence import Sequence, even_shares, spans


def head_shares(heads: int, ranks: int) -> list[slice]:
    """The query heads of each rank; the last ranks have fewer, or none, where they do not divide."""
    return spans(even_shares(heads, ranks))


def key_heads(queries: slice, share: int) -> list[int]:
    """The key head of each of these query heads, `share` of which have the same one; each once if they divide evenly.

    Where a rank has part of the query heads of a key head, every query head has a copy of its own.
    """
    each = [head // share for head in range(queries.start, queries.stop)]
    distinct = list(dict.fromkeys(each))
    even = all(each.count(head) * len(distinct) == len(each) for head in distinct)
    return distinct if even else each


def to_heads(query: Tensor, key: Tensor, value: Tensor, of: Sequence) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads, by one exchange."""
    H, G = query.shape[1], key.shape[1]
    shares = head_shares(H, of.ranks)
    keys = [key_heads(share, H // G) for share in shares]
    parts = [
        torch.cat([x.reshape(-1) for x in (query[:, share], key[:, own], value[:, own])])
        for share, own in zip(shares, keys, strict=True)
    ]
    B, heads, groups = query.shape[0], shares[of.rank].stop - shares[of.rank].start, len(keys[of.rank])
    shapes = [
        [(B, heads, n, query.shape[3]), (B, groups, m, key.shape[3]), (B, groups, m, value.shape[3])]
        for n, m in zip(of.lengths, of.key_lengths, strict=True)
    ]
    sizes = [[torch.Size(shape).numel() for shape in each] for each in shapes]
    received = exchange(parts, [(sum(each),) for each in sizes], of.group)
    split = [part.split(each) for part, each in zip(received, sizes, strict=True)]
    whole = [
        torch.cat([part[i].view(shape[i]) for part, shape in zip(split, shapes, strict=True)], dim=2) for i in range(3)
    ]
    return whole[0], whole[1], whole[2]


def to_tokens(out: Tensor, of: Sequence, heads: int) -> Tensor:
    """This rank's tokens of all heads, from all tokens (B,h,N,…) of its heads."""
    shares, N = head_shares(heads, of.ranks), of.lengths[of.rank]
    parts: Parts[Tensor] = [out[:, :, span] for span in spans(of.lengths)]
    shapes = [(out.shape[0], share.stop - share.start, N, *out.shape[3:]) for share in shares]
    return torch.cat(exchange(parts, shapes, of.group), dim=1)
