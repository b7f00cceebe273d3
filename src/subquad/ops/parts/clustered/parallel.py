"""Clustered attention of queries and keys that are split over ranks.

Clusters hold queries of all ranks, and their centroids attend to the keys of all ranks. What is sent has C rows, or
C·k, beside what makes the clusters (`ops.choose.ranks.clusters`):

    centroids    sums of the members of each rank, and how many there are           C·(D + 1)
    top keys     each rank's k largest logits                                       C·k
    A^c          each rank's partial over its own keys                              C·(E + 1)
    rows         the top keys and their values, added up over the ranks             C·k·(D + E)

Members, and their attention to the top keys T of their cluster, stay where they are. With A^c the centroid's weights,
m̂ = Σ_T A^c_l, and r = Σ A^c_l V_l over all other keys, a member's output

    V̂_i = m̂ softmax_T(Q_i K_Tᵀ) V_T + r = softmax_T(Q_i K_Tᵀ) (m̂ V_T + r)

is attention to the top keys with other values, and its log-sum-exp is theirs with − ln m̂ added to each logit.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.ops.choose.ranks.clusters import Clustering, clusters_of_ranks
from subquad.ops.groups import broadcast
from subquad.ops.padding import cleared
from subquad.ops.parts.clustered.centroids import attend_and_list
from subquad.ops.parts.listed.op import attend_in_clusters
from subquad.ops.parts.sums.op import group_sums
from subquad.ops.precision import wide
from subquad.ops.rows import WithRows
from subquad.ops.softmax import merge_partials
from subquad.ops.standing import merge_of_ranks
from subquad.parallel import Sequence
from subquad.parallel.collectives import gather
from subquad.parallel.shares import spans
from subquad.parallel.together import add_together, gather_and_add

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]
LEAST = 1e-30  # of the mass of top keys, whose logarithm is taken


class Top(NamedTuple):
    """The top keys of each cluster among the candidates of all ranks, the largest score first.

    Attributes:
        there: False where there are fewer.
        own: which of this rank's k candidates each is; k where it is another rank's.
        taken: which of this rank's candidates are among them.
    """

    there: Bool[Tensor, "B H C K"]
    own: Int64[Tensor, "B H C K"]
    taken: Bool[Tensor, "B H C k"]


def clustered_attention_of_ranks(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    real_queries: Bool[Tensor, "B N"] | None,
    real_keys: Bool[Tensor, "B M"] | None,
    of: Sequence,
    how: Clustering,
    *,
    topk: int,
    scale: float,
) -> Partial:
    """`clustered_attention` over the tokens of all ranks, of which these are one rank's."""
    query, key, value = cleared(query, real_queries), cleared(key, real_keys), cleared(value, real_keys)
    labels, _ = clusters_of_ranks(query, key, value, (real_queries, real_keys), of, how)
    query, key, value = wide(query, key, value)
    means = means_of_ranks(query, labels, how.clusters, of)
    topk = min(topk, sum(of.key_lengths))
    all_keys, all_values = WithRows(key), WithRows(value)
    out, lse, own = attend_and_list(means, all_keys.whole, all_values.whole, real_keys, topk=topk, scale=scale)
    if topk == 0:
        out, lse = merge_of_ranks(out, lse, of)
        of_members = broadcast(lse.unsqueeze(-1), labels).squeeze(-1).masked_fill(labels == how.clusters, -torch.inf)
        return broadcast(out, labels), of_members
    keys, values = rows_of(all_keys, own), rows_of(all_values, own)
    scores = (keys.detach() @ means.detach().unsqueeze(-1)).squeeze(-1) * scale
    top = choose_top(scores.masked_fill(own == key.shape[2], -torch.inf), topk, of)
    parts, rows = gather_and_add(torch.cat([out, lse.unsqueeze(-1)], dim=-1), in_slots(keys, values, top), of.group)
    out, lse = merge_partials([(part[..., :-1], part[..., -1]) for part in parts])
    keys, values = rows.split([key.shape[3], value.shape[3]], dim=-1)
    logits = (keys @ means.unsqueeze(-1)).squeeze(-1) * scale
    logits = (logits - lse.masked_fill(torch.isneginf(lse), 0.0).unsqueeze(3)).masked_fill(~top.there, -torch.inf)
    weights = logits.exp()
    mass = weights.sum(-1)
    rest = out - (weights.unsqueeze(3) @ values).squeeze(3)
    values = mass[..., None, None] * values + rest.unsqueeze(3)
    bias = -mass.clamp(min=LEAST).log()
    return attend_in_clusters(query, labels, keys, values, bias.unsqueeze(3).expand_as(logits), top.there, scale)


def means_of_ranks(
    query: Float[Tensor, "B H N D"], labels: Int64[Tensor, "B H N"], clusters: int, of: Sequence
) -> Float[Tensor, "B H C D"]:
    """The means of the clusters over all ranks; 0 for an empty one."""
    sums, sizes = group_sums(query, labels, clusters)
    sums, sizes = add_together([sums, sizes.to(sums.dtype)], of.group)
    return sums / sizes.clamp(min=1).unsqueeze(-1)


def rows_of(x: WithRows, chosen: Int64[Tensor, "B H C K"]) -> Float[Tensor, "B H C K D"]:
    """The vectors of these tokens of each head; any for the number M, which is none."""
    B, G, M, _ = x.whole.shape
    rows = x.rows(chosen.clamp(max=M - 1).view(B, G, -1))
    return rows.view(*chosen.shape, -1)


def choose_top(scores: Float[Tensor, "B H C k"], topk: int, of: Sequence) -> Top:
    """The candidates of all ranks with the largest scores, by one exchange; of equal ones those in front."""
    widths = [min(topk, n) for n in of.key_lengths]
    every = torch.cat(gather(scores, [(*scores.shape[:3], width) for width in widths], of.group), dim=3)
    found, place = (x[..., :topk] for x in every.sort(dim=-1, descending=True, stable=True))
    there = ~torch.isneginf(found)
    among = torch.zeros_like(every, dtype=torch.bool).scatter(3, place, there)
    mine = spans(widths)[of.rank]
    own = torch.where(there & (place >= mine.start) & (place < mine.stop), place - mine.start, widths[of.rank])
    return Top(there, own, among[..., mine])


def in_slots(
    keys: Float[Tensor, "B H C k D"], values: Float[Tensor, "B H C k E"], top: Top
) -> Float[Tensor, "B H C K D+E"]:
    """The keys and values of this rank's candidates where they are among the top keys; 0 for those of other ranks."""
    rows = torch.cat([keys, values], dim=-1)
    none = top.own == rows.shape[3]
    at = top.own.masked_fill(none, 0).unsqueeze(-1).expand(-1, -1, -1, -1, rows.shape[4])
    return rows.gather(3, at).masked_fill(none.unsqueeze(-1), 0.0)
