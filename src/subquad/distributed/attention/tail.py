"""Attention with a tail over the tokens of all ranks.

Clusters hold queries of all ranks, cells hold keys of all ranks. In addition to the exchanges
that make these (`selection.clusters`), ranks send, in rows of C, X, or C·k:

    means        sums of each cluster's queries and each cell's keys, and how many there are;
                 the queries' second moments                                                      (C + X)·(D + 1) + D²
    scores       each rank's k keys with the largest scores                                       C·k
    cells        k̄, v̄ and ln Σ of each rank's keys of each cell as each mean sees them, without
                 the exact keys; partials, which merge                                            C·X·(D + E + 1)
    rows         the exact keys and their values, added up over the ranks                         C·k·(D + E)

A rank leaves all its candidates out of its cells, in the pass over its keys that finds them; those that are not among
the exact keys of all ranks join their cells afterwards. Nothing is taken out of a sum.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.distributed.attention.clustered_attention import rows_of
from subquad.distributed.attention.merging import merging
from subquad.distributed.rows import combine_together, summed
from subquad.distributed.selection.clusters import ClusterSettings, clusters_of_ranks
from subquad.distributed.selection.top import choose
from subquad.distributed.together import add_together
from subquad.distributed.token_split import TokenSplit
from subquad.distributed.with_rows import WholeAndRows
from subquad.kernels.attention.listed.op import attend_in_clusters
from subquad.kernels.attention.partial_rows import as_partial
from subquad.kernels.attention.sums.op import group_sums
from subquad.kernels.attention.tail.key_choice import terms_of_choice
from subquad.kernels.attention.tail.visible_key_cells import VisibleTail, visible_key_cells
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.padding import cleared

Partial = tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]


def tail_of_ranks(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    valid_queries: Bool[Tensor, "B N"] | None,
    valid_keys: Bool[Tensor, "B M"] | None,
    split: TokenSplit,
    settings: ClusterSettings,
    *,
    topk: int,
    cells: int,
    scale: float,
) -> Partial:
    """`query_clusters`, `key_cells` and `attend_with_tail` of all ranks' tokens, of which these are one rank's."""
    query, key, value = cleared(query, valid_queries), cleared(key, valid_keys), cleared(value, valid_keys)
    labels, cell = clusters_of_ranks(query, key, value, (valid_queries, valid_keys), split, settings, cells)
    assert cell is not None
    query, key, value = upcast(query, key, value)
    means, cell_means, mean, around = _means(query, labels, settings.clusters, key.detach(), cell, cells, split)
    terms = terms_of_choice(key.detach(), cell, cell_means, mean, around, scale)
    all_keys, all_values = WholeAndRows(key), WholeAndRows(value)
    visible = visible_key_cells(
        means, all_keys.whole, all_values.whole, cell, terms, cells=cells, topk=topk, scale=scale
    )
    keys, values = rows_of(all_keys, visible.top), rows_of(all_values, visible.top)
    cell_of = rows_of(WholeAndRows(cell.unsqueeze(-1)), visible.top).squeeze(-1)
    logits = (keys @ means.unsqueeze(-1)).squeeze(-1) * scale
    with torch.no_grad():
        of_top = F.pad(terms, (0, 1)).unsqueeze(2).expand(-1, -1, visible.top.shape[2], -1).gather(3, visible.top)
        scores = (logits + of_top).masked_fill(visible.top == key.shape[2], -torch.inf)
    top = choose(scores, topk, split.key_lengths, split)
    joining = ~top.mine & (visible.top < key.shape[2])
    visible = _joined(visible, keys, values, logits.masked_fill(~joining, -torch.inf), cell_of)

    D, E = key.shape[3], value.shape[3]
    visible_cells = merging(torch.cat([visible.key, visible.value], dim=-1), visible.lse)
    rows = top.in_slots(torch.cat([keys, values], dim=-1))
    both, rows = combine_together([visible_cells, summed(rows)], split.group)
    (both, lse), (keys, values) = as_partial(both), rows.split([D, E], dim=-1)
    bias = lse - (both[..., :D] @ means.unsqueeze(-1)).squeeze(-1) * scale
    return attend_in_clusters(
        query,
        labels,
        torch.cat([keys, both[..., :D]], dim=3),
        torch.cat([values, both[..., D:]], dim=3),
        torch.cat([torch.zeros_like(keys[..., 0]), bias], dim=3),
        torch.cat([top.filled, ~torch.isneginf(lse)], dim=3),
        scale,
    )


def _means(
    query: Tensor, labels: Tensor, clusters: int, key: Tensor, cell: Tensor, cells: int, split: TokenSplit
) -> tuple[Float[Tensor, "B H C D"], Float[Tensor, "B G X D"], Float[Tensor, "B G 1 D"], Float[Tensor, "B H D D"]]:
    """The means of the clusters, of the cells and of all keys over all ranks, and `covariance_in_clusters`.

    They take one exchange. A mean is 0 for an empty one.
    The covariance is Σ_i q_i q_iᵀ − Σ_c n_c q̄_c q̄_cᵀ, divided by the number of queries.
    """
    inside = query.detach().masked_fill((labels >= clusters).unsqueeze(-1), 0.0)
    both = [*group_sums(query, labels, clusters), *group_sums(key, cell, cells), inside.mT @ inside]
    sums, sizes, of_cells, in_cells, moments = add_together([x.to(both[0].dtype) for x in both], split.group)
    means = sums / sizes.clamp(min=1).unsqueeze(-1)
    with torch.no_grad():
        between = sums.mT @ means
        around = (moments - between) / sizes.sum(-1).clamp(min=1)[..., None, None]
        of_cells, in_cells = of_cells.detach(), in_cells.unsqueeze(-1)
        of_keys = of_cells.sum(2, keepdim=True) / in_cells.sum(2, keepdim=True).clamp(min=1)
    return means, of_cells / in_cells.clamp(min=1), of_keys, around


def _joined(
    visible: VisibleTail,
    keys: Float[Tensor, "B H C K D"],
    values: Float[Tensor, "B H C K E"],
    logits: Float[Tensor, "B H C K"],
    cell_of: Int64[Tensor, "B H C K"],
) -> VisibleTail:
    """The cells with those of the listed keys whose logit is not −inf."""
    X = visible.lse.shape[3]
    inside = cell_of.unsqueeze(3) == torch.arange(X, device=keys.device)[:, None]
    spread = logits.unsqueeze(3).masked_fill(~inside, -torch.inf)  # (B,H,C,X,K)
    both = torch.cat([spread, visible.lse.unsqueeze(-1)], dim=-1)
    highest = both.detach().amax(-1, keepdim=True)
    weights = (both - torch.where(torch.isneginf(highest), 0.0, highest)).exp()
    total = weights.sum(-1, keepdim=True)
    present = total > 0
    shares = weights / torch.where(present, total, 1.0)
    of_rows, of_cells = shares[..., :-1], shares[..., -1:]
    lse = torch.where(present, torch.where(present, total, 1.0).log() + highest, -torch.inf).squeeze(-1)
    return VisibleTail(
        of_rows @ keys + of_cells * visible.key, of_rows @ values + of_cells * visible.value, lse, visible.top
    )
