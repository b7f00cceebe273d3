"""Clustered attention of queries and keys that are split over ranks.

Clusters hold queries of all ranks, and their centroids attend to the keys of all ranks. What is sent has C rows, or
C·k, in addition to the exchanges of the clusters (`selection.clusters`):

    centroids    sums of the members of each rank, and how many there are           C·(D + 1)
    top keys     each rank's k largest logits, which decide                         C·k
    A^c          each rank's partial over its own keys; partials merge              C·(E + 1)
    rows         the top keys and their values, added up over the ranks             C·k·(D + E)

Members, and their attention to the top keys T of their cluster, stay where they are. With A^c the centroid's weights,
m̂ = Σ_T A^c_l, and r = Σ A^c_l V_l over all other keys, a member's output

    V̂_i = m̂ softmax_T(Q_i K_Tᵀ) V_T + r = softmax_T(Q_i K_Tᵀ) (m̂ V_T + r)

is attention to the top keys with other values, and its log-sum-exp is theirs with − ln m̂ added to each logit.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.distributed.attention.merging import merge_of_ranks, merging
from subquad.distributed.rows import combine_together, summed
from subquad.distributed.selection.clusters import ClusterSettings, clusters_of_ranks
from subquad.distributed.selection.top import choose
from subquad.distributed.together import add_together
from subquad.distributed.token_split import TokenSplit
from subquad.distributed.with_rows import WholeAndRows
from subquad.kernels.attention.clustered.centroids import attend_and_list
from subquad.kernels.attention.listed.op import attend_in_clusters
from subquad.kernels.attention.partial_rows import as_partial
from subquad.kernels.attention.sums.op import group_sums
from subquad.kernels.precision import upcast
from subquad.kernels.selection.group_means import broadcast
from subquad.kernels.tokens.padding import cleared

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]
LEAST = 1e-30  # of the mass of top keys, whose logarithm is taken


def clustered_attention_of_ranks(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    valid_queries: Bool[Tensor, "B N"] | None,
    valid_keys: Bool[Tensor, "B M"] | None,
    split: TokenSplit,
    settings: ClusterSettings,
    *,
    topk: int,
    scale: float,
) -> Partial:
    """`clustered_attention` over the tokens of all ranks, of which these are one rank's."""
    query, key, value = cleared(query, valid_queries), cleared(key, valid_keys), cleared(value, valid_keys)
    labels, _ = clusters_of_ranks(query, key, value, (valid_queries, valid_keys), split, settings)
    query, key, value = upcast(query, key, value)
    means = means_of_ranks(query, labels, settings.clusters, split)
    topk = min(topk, sum(split.key_lengths))
    all_keys, all_values = WholeAndRows(key), WholeAndRows(value)
    out, lse, listed = attend_and_list(means, all_keys.whole, all_values.whole, valid_keys, topk=topk, scale=scale)
    if topk == 0:
        out, lse = merge_of_ranks(out, lse, split)
        of_members = (
            broadcast(lse.unsqueeze(-1), labels).squeeze(-1).masked_fill(labels == settings.clusters, -torch.inf)
        )
        return broadcast(out, labels), of_members
    keys, values = rows_of(all_keys, listed), rows_of(all_values, listed)
    scores = (keys.detach() @ means.detach().unsqueeze(-1)).squeeze(-1) * scale
    top = choose(scores.masked_fill(listed == key.shape[2], -torch.inf), topk, split.key_lengths, split)
    rows = top.in_slots(torch.cat([keys, values], dim=-1))
    both, rows = combine_together([merging(out, lse), summed(rows)], split.group)
    (out, lse), (keys, values) = as_partial(both), rows.split([key.shape[3], value.shape[3]], dim=-1)
    logits = (keys @ means.unsqueeze(-1)).squeeze(-1) * scale
    logits = (logits - lse.masked_fill(torch.isneginf(lse), 0.0).unsqueeze(3)).masked_fill(~top.filled, -torch.inf)
    weights = logits.exp()
    mass = weights.sum(-1)
    remaining = out - (weights.unsqueeze(3) @ values).squeeze(3)
    values = mass[..., None, None] * values + remaining.unsqueeze(3)
    bias = -mass.clamp(min=LEAST).log()
    return attend_in_clusters(query, labels, keys, values, bias.unsqueeze(3).expand_as(logits), top.filled, scale)


def means_of_ranks(
    query: Float[Tensor, "B H N D"], labels: Int64[Tensor, "B H N"], clusters: int, split: TokenSplit
) -> Float[Tensor, "B H C D"]:
    """The means of the clusters over all ranks; 0 for an empty one."""
    sums, sizes = group_sums(query, labels, clusters)
    sums, sizes = add_together([sums, sizes.to(sums.dtype)], split.group)
    return sums / sizes.clamp(min=1).unsqueeze(-1)


def rows_of(x: WholeAndRows, chosen: Int64[Tensor, "B H C K"]) -> Float[Tensor, "B H C K D"]:
    """The vectors of these tokens of each head; any for the number M, which is none."""
    B, G, M, _ = x.whole.shape
    rows = x.rows(chosen.clamp(max=M - 1).view(B, G, -1))
    return rows.view(*chosen.shape, -1)
