"""Attention to exact keys and a tail of cells, in plain PyTorch."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.attention.pairs.op import attend_pairs
from subquad.kernels.attention.residual_merging import merge_with_residual
from subquad.kernels.attention.softmax import merge_partials
from subquad.kernels.attention.tail.key_cells import CellAttention, Tail, attend_to_cells, tail_of
from subquad.kernels.attention.tail.key_choice import covariance_in_clusters, terms_of_keys, top_keys
from subquad.kernels.precision import upcast
from subquad.kernels.selection.blocks.op import by_bucket
from subquad.kernels.selection.deduplication import first_meetings
from subquad.kernels.selection.group_means import group_mean
from subquad.kernels.selection.neighbours import neighbours
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.tokens.slots import Buckets
from subquad.masks import Mask


def attend_with_tail(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    labels: Int64[Tensor, "B H N"],
    cell: Int64[Tensor, "B G M"],
    keys: Int64[Tensor, "B H C K"] | None,
    *,
    clusters: int,
    topk: int,
    cells: int,
    scale: float,
    wanted: Int64[Tensor, "B"] | None = None,
    means: Float[Tensor, "B H C D"] | None = None,
    around: Float[Tensor, "B H D D"] | None = None,
    window: int = 0,
    start: Int64[Tensor, "B"] | None = None,
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Each query's attention in one softmax over the exact keys of its cluster and a tail of cells: (out, lse).

    With q̄ the mean of a cluster's queries, T its exact keys, and w the softmax of scale·q̄·k_j over those keys of a cell
    that are not in T:

        k̄ = Σ_j w_j k_j,   v̄ = Σ_j w_j v_j,   ln Σ_j e^{scale·q·k_j} ≈ scale·(q − q̄)·k̄ + ln Σ_j e^{scale·q̄·k_j}

    This is the first-order expansion at q = q̄, and exact there: a query that is alone in its cluster has exact
    attention. At q̄ = 0 it would be a plain mean and + ln n.

    Args:
        labels: the cluster of each query; `clusters` for none: out 0, lse −inf.
        cell: the cell of each key; `cells` for none: no query meets such a key, whatever it holds.
        keys: T of each cluster; M where a slot is empty. None: the `topk` keys with the largest scale·q̄·k_j + t_j, the
            terms t_j being those of `terms_of_choice`: those which their cell would misplace the most weight of.
        wanted: how many of those each item takes, at most `topk`; None: all.
        means: q̄ of each cluster, of other queries than these; None: of the cluster's queries. The expansion holds
            around any vector; it is the closer, the nearer its queries are.
        around: W of `terms_of_choice`, which goes with `means`; None: that of these queries.
        window: keys at most so far from a query are exact for it too, and their cells do not count them; 0: none.
        start: the position of the first query of each item among the keys, for the window; None: at the first key.

    The gradient flows through the means q̄, the cells and the exact keys; labels, cells and T are constants.
    """
    query, key, value = upcast(query, key, value)
    means, keys, tail = exact_keys_and_cells(
        query, key, value, labels, cell, keys, clusters, topk, cells, scale, wanted, means, around
    )
    if window == 0:
        return attend_to_keys_and_cells(query, key, value, keys, tail, labels, scale=scale, dropout_p=dropout_p)
    options = {"scale": scale, "dropout_p": dropout_p}
    of_cells = attend_to_cells(query, key, means, tail, labels, cell, **options)
    return with_near_keys(query, key, value, keys, of_cells, labels, cell, cells, window, start, **options)


def exact_keys_and_cells(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    labels: Int64[Tensor, "B H N"],
    cell: Int64[Tensor, "B G M"],
    keys: Int64[Tensor, "B H C K"] | None,
    clusters: int,
    topk: int,
    cells: int,
    scale: float,
    wanted: Int64[Tensor, "B"] | None = None,
    means: Float[Tensor, "B H C D"] | None = None,
    around: Float[Tensor, "B H D D"] | None = None,
) -> tuple[Float[Tensor, "B H C D"], Int64[Tensor, "B H C K"], Tail]:
    """q̄, T and the cells of `attend_with_tail`, whose inputs are in fp32 or better."""
    means = group_mean(query, labels, clusters) if means is None else means.to(query.dtype)
    if keys is None:
        around = covariance_in_clusters(query, labels, means) if around is None else around.to(query.dtype)
        terms = terms_of_keys(key, cell, around, cells, scale)
        keys = top_keys(means, key, cell, topk, wanted, cells, scale, terms)
    return means, keys, tail_of(means, key, value, keys, cell, cells, scale)


def cells_and_exact_pairs(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    labels: Int64[Tensor, "B H N"],
    cell: Int64[Tensor, "B G M"],
    keys: Int64[Tensor, "B H C K"] | None,
    *,
    clusters: int,
    topk: int,
    cells: int,
    scale: float,
    wanted: Int64[Tensor, "B"] | None = None,
    dropout_p: float = 0.0,
) -> tuple[CellAttention, Buckets]:
    """The parts of `attend_with_tail`, with its arguments: attention to the cells, and who meets which exact keys."""
    query, key, value = upcast(query, key, value)
    means, keys, tail = exact_keys_and_cells(
        query, key, value, labels, cell, keys, clusters, topk, cells, scale, wanted
    )
    of_cells = attend_to_cells(query, key, means, tail, labels, cell, scale=scale, dropout_p=dropout_p)
    queries, cluster = by_bucket(labels, clusters)
    return of_cells, Buckets(queries, keys, cluster)


def with_near_keys(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    keys: Int64[Tensor, "B H C K"],
    of_cells: CellAttention,
    labels: Int64[Tensor, "B H N"],
    cell: Int64[Tensor, "B G M"],
    cells: int,
    window: int,
    start: Int64[Tensor, "B"] | None,
    *,
    scale: float,
    dropout_p: float,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Attention to the exact keys, to the keys near each query, and to what then is left of the cells.

    A near key that is not an exact one of the query's cluster has its own weight, and that which its cell gives it is
    taken from the cells.
    """
    (H, N), M, clusters = query.shape[1:3], key.shape[2], keys.shape[2]
    queries, cluster = by_bucket(labels, clusters)
    exact = Buckets(queries, keys, cluster)
    mask = Mask(offset=start)
    near = neighbours(query, key, window, mask)
    near = Buckets(
        _present(near.queries, labels < clusters, N),
        _present(near.keys, repeat_heads((cell < cells)[:, :, None], H)[:, :, 0], M),
        span=near.span,
    )
    shown = first_meetings((near,), N, M, mask, (exact,))
    of_top = attend_pairs(query, key, value, exact, Mask(), scale=scale, dropout_p=dropout_p)
    of_near = attend_pairs(query, key, value, near, mask, scale=scale, dropout_p=dropout_p, shown=shown)
    of_counted = attend_pairs(of_cells.of_query, of_cells.of_key, value, near, mask, scale=1.0, shown=shown)
    return merge_with_residual(merge_partials([of_top, of_near]), of_cells.partial, of_counted)


def _present(slots: Int64[Tensor, "B H T S"], present: Bool[Tensor, "B H N"], tokens: int) -> Int64[Tensor, "B H T S"]:
    """The slots, empty where their token is not present."""
    inside = F.pad(present, (0, 1)).gather(2, slots.flatten(2)).view_as(slots)
    return torch.where(inside, slots, tokens)


def attend_to_keys_and_cells(
    query: Float[Tensor, "B H N D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M E"],
    keys: Int64[Tensor, "B H C K"],
    tail: Tail,
    labels: Int64[Tensor, "B H N"],
    *,
    scale: float,
    dropout_p: float = 0.0,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Attention of each query to the exact keys of its cluster and the cells, in one softmax."""
    H, M = query.shape[1], key.shape[2]
    cells, clusters = tail.bias.shape[2:]
    # The cells join the keys: cell x of cluster c is key number M + x·C + c, which this cluster alone meets.
    end = M + cells * clusters
    present = ~torch.isneginf(tail.bias)
    numbers = torch.arange(M, end, device=query.device).view(cells, clusters)
    slots = torch.where(keys < M, keys, end)
    queries, cluster = by_bucket(labels, clusters)
    bias = torch.where(present, tail.bias, 0.0).flatten(2)
    return attend_pairs(
        query,
        torch.cat([repeat_heads(key, H), tail.key.flatten(2, 3)], dim=2),
        torch.cat([repeat_heads(value, H), tail.value.flatten(2, 3)], dim=2),
        Buckets(queries, torch.cat([slots, torch.where(present, numbers, end).transpose(2, 3)], dim=3), cluster),
        Mask(),
        scale=scale,
        key_bias=torch.cat([bias.new_zeros(*bias.shape[:2], M), bias], dim=2),
        dropout_p=dropout_p,
    )
