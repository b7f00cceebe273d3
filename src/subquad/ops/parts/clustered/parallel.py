"""Clustered attention of queries and keys that are split over ranks, in plain PyTorch.

Clusters hold queries of all ranks, and their centroids attend to the keys of all ranks. What is sent has C
rows, or C·k:

    k-means      signs of the first centroids, and of each iteration the sums of the members' signs    C·bits
    centroids    sums of the members of each rank, and how many there are                              C·(D + 1)
    A^c          each rank's partial over its own keys; partials merge                                 C·(E + 1)
    top keys     each rank's k largest logits, then the keys and values of those among the largest     C·k·(D + E + 1)

Members, and their attention to the top keys of their cluster, stay where they are.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.ops.choose.blocks.reference import sort_into_blocks
from subquad.ops.choose.hashing.op import hash_codes, unpack_signs
from subquad.ops.choose.kmeans.reference import keep_real, majority, nearest, ranks_and_counts, votes_of
from subquad.ops.groups import broadcast, group_sizes
from subquad.ops.heads import repeat_heads
from subquad.ops.padding import cleared
from subquad.ops.parts.clustered.reference import BLOCK
from subquad.ops.precision import wide
from subquad.ops.softmax import merge_partials, visible_logsumexp, visible_softmax
from subquad.parallel import Sequence
from subquad.parallel.collectives import add, gather

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


class Top(NamedTuple):
    """The top keys of each cluster, the largest logit first.

    Attributes:
        own: which of this rank's keys they are.
        place: where they stand among the candidates of all ranks.
        there: False where there are fewer keys.
        candidates: this rank's own, as numbers of its keys.
        taken: which of the candidates are among the top keys.
    """

    own: Bool[Tensor, "B H C M"]
    place: Int64[Tensor, "B H C K"]
    there: Bool[Tensor, "B H C K"]
    candidates: Int64[Tensor, "B H C k"]
    taken: Bool[Tensor, "B H C k"]


def clustered_attention_of_ranks(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    real_queries: Bool[Tensor, "B N"] | None,
    real_keys: Bool[Tensor, "B M"] | None,
    of: Sequence,
    *,
    topk: int,
    scale: float,
    **clustering: int,
) -> Partial:
    """`clustered_attention` over the tokens of all ranks, of which these are one rank's."""
    query, key, value = cleared(query, real_queries), cleared(key, real_keys), cleared(value, real_keys)
    clusters, heads = clustering["clusters"], query.shape[1]
    labels = cluster_queries(query.detach(), real_queries, of, **clustering)
    query, key, value = wide(query)[0], *(repeat_heads(x, heads) for x in wide(key, value))
    visible = torch.ones_like(key[..., None, :, 0], dtype=torch.bool)
    visible = visible if real_keys is None else visible & real_keys[:, None, None, :]

    logits = _means(query, labels, clusters, of) @ key.mT * scale
    if topk == 0:
        out, lse = _merged(visible_softmax(logits, visible) @ value, visible_logsumexp(logits, visible), of)
        return broadcast(out, labels), broadcast(lse.unsqueeze(-1), labels).squeeze(-1)
    top = top_keys(logits.detach(), visible, min(topk, sum(of.key_lengths)), of)
    others = visible & ~top.own
    rest = visible_softmax(logits, others) @ value, visible_logsumexp(logits, others)
    return _of_members(query, key, value, labels, rest, visible_logsumexp(logits, top.own), top, scale, of)


def cluster_queries(
    query: Float[Tensor, "B H N D"],
    real: Bool[Tensor, "B N"] | None,
    of: Sequence,
    *,
    clusters: int,
    bits: int,
    iterations: int,
    seed: int,
) -> Int64[Tensor, "B H N"]:
    """The cluster of each query of this rank, of clusters that hold queries of all ranks."""
    B, _, N, _ = query.shape
    rank, count = ranks_and_counts(real, B, N, query.device)
    counts = gather(count, [count.shape] * of.ranks, of.group)
    before, count = sum(counts[: of.rank], torch.zeros_like(count)), torch.stack(counts).sum(0)
    rank = rank + before[:, None]
    real_or_all = torch.ones_like(rank, dtype=torch.bool) if real is None else real

    # In fp64, so that the order of the sum cannot turn a bit of the hash.
    exact = query.double()
    mean = (
        add((exact * real_or_all[:, None, :, None]).sum(2, keepdim=True), of.group)
        / count.clamp(min=1)[:, None, None, None]
    )
    centred = (exact - mean).to(torch.promote_types(query.dtype, torch.float32))
    signs = unpack_signs(hash_codes(centred, bits, seed, real=real), bits)

    first = torch.arange(clusters, device=query.device) * count[:, None] // clusters
    starts = (rank[:, None] == first[..., None]) & real_or_all[:, None]
    centroids = add(starts[:, None].to(signs.dtype) @ signs, of.group)
    wanted = torch.full_like(count, clusters)
    for _ in range(iterations):
        labels = keep_real(nearest(signs, centroids, wanted), real, clusters)
        centroids = majority(add(votes_of(signs, labels, clusters), of.group), centroids)
    labels = torch.where((count <= wanted)[:, None, None], rank[:, None], nearest(signs, centroids, wanted))
    return keep_real(labels, real, clusters)


def _means(query: Tensor, labels: Tensor, clusters: int, of: Sequence) -> Float[Tensor, "B H C D"]:
    """The means of the clusters over all ranks; 0 for an empty one."""
    sums = query.new_zeros(*query.shape[:2], clusters + 1, query.shape[3])
    sums = sums.scatter_add(2, labels[..., None].expand_as(query), query)[:, :, :clusters]
    sizes = group_sizes(labels, clusters).unsqueeze(-1).to(sums.dtype)
    sums, sizes = add(torch.cat([sums, sizes], dim=-1), of.group).split([query.shape[3], 1], dim=-1)
    return sums / sizes.clamp(min=1)


def _merged(out: Tensor, lse: Tensor, of: Sequence) -> Partial:
    """The partial over the keys of all ranks."""
    both = torch.cat([out, lse.unsqueeze(-1)], dim=-1)
    parts = [part.split([out.shape[-1], 1], dim=-1) for part in gather(both, [both.shape] * of.ranks, of.group)]
    return merge_partials([(out, lse.squeeze(-1)) for out, lse in parts])


def top_keys(logits: Float[Tensor, "B H C M"], visible: Bool[Tensor, "B H 1 M"], K: int, of: Sequence) -> Top:
    """The K keys of all ranks with the largest logits of each cluster; of equal ones those in front."""
    hidden = logits.masked_fill(~visible, -torch.inf)
    most = min(K, logits.shape[3])
    values, candidates = (x[..., :most] for x in hidden.sort(dim=-1, descending=True, stable=True))
    widths = [min(K, n) for n in of.key_lengths]
    every = torch.cat(gather(values, [(*values.shape[:3], width) for width in widths], of.group), dim=3)
    found, place = (x[..., :K] for x in every.sort(dim=-1, descending=True, stable=True))
    there = ~torch.isneginf(found)
    among = torch.zeros_like(every, dtype=torch.bool).scatter(3, place, there)
    taken = among.split(widths, dim=3)[of.rank]
    own = torch.zeros_like(hidden, dtype=torch.bool).scatter(3, candidates, taken)
    return Top(own, place, there, candidates, taken)


def _of_members(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    labels: Tensor,
    rest: tuple[Tensor, Tensor],  # of the clusters
    of_top: Tensor,
    top: Top,
    scale: float,
    of: Sequence,
) -> Partial:
    """Attention of this rank's queries: to the top keys of their cluster by themselves, to the rest by the centroid."""
    B, H, C, _ = top.place.shape
    D, E = key.shape[3], value.shape[3]
    rows = torch.cat([_rows(key, top.candidates), _rows(value, top.candidates)], dim=-1)
    rows = rows.masked_fill(~top.taken.unsqueeze(-1), 0.0)
    lses = torch.stack([rest[1], of_top], dim=-1)
    sent = torch.cat([rest[0], lses, rows.flatten(3)], dim=-1)
    widths = [E + 2 + min(top.place.shape[3], n) * (D + E) for n in of.key_lengths]
    parts = [
        part.split([E, 2, part.shape[3] - E - 2], dim=3)
        for part in gather(sent, [(B, H, C, w) for w in widths], of.group)
    ]

    rest_out, rest_lse = merge_partials([(out, lse[..., 0]) for out, lse, _ in parts])
    top_lse = torch.stack([lse[..., 1] for _, lse, _ in parts], dim=-1)
    top_lse = visible_logsumexp(top_lse, ~torch.isneginf(top_lse))
    shares = torch.stack([top_lse, rest_lse], dim=-1)
    mass, of_rest = visible_softmax(shares, ~torch.isneginf(shares)).unsqueeze(-1).unbind(-2)

    every = torch.cat([rows.unflatten(3, (-1, D + E)) for _, _, rows in parts], dim=3)
    rows = every.gather(3, top.place.unsqueeze(-1).expand(-1, -1, -1, -1, D + E))
    blocks = sort_into_blocks(labels, C, BLOCK)
    keys, values = blocks.of_group(rows).split([D, E], dim=-1)
    seen = blocks.of_group(top.there.unsqueeze(-1)).transpose(-1, -2)
    own = blocks.gather(query) @ keys.mT * scale
    of_members = blocks.scatter(visible_softmax(own, seen) @ values)
    mass = broadcast(mass, labels)
    lse = blocks.scatter(visible_logsumexp(own, seen).unsqueeze(-1)) - mass.masked_fill(mass == 0, 1.0).log()
    return mass * of_members + broadcast(of_rest * rest_out, labels), lse.squeeze(-1)


def _rows(x: Float[Tensor, "B H M D"], chosen: Int64[Tensor, "B H C K"]) -> Float[Tensor, "B H C K D"]:
    return x.gather(2, chosen.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[3])).unflatten(2, chosen.shape[2:])
