"""The op `attend_with_tail`: the exact keys of a cluster, and all other keys as a few cells."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from subquad.ops.backends import Gradient, Op, Operator
from subquad.ops.parts.tail import reference
from subquad.ops.tensors import token_major


@Op
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
        keys: T of each cluster; M where a slot is empty. None: the `topk` keys with the largest
            e^{scale·q̄·k_j}·‖k_j − m_j‖, where m_j is the mean key of their cell: those which their cell would misplace
            the most weight of.
        wanted: how many of those each item takes, at most `topk`; None: all.

    The gradient flows through the means q̄, the cells and the exact keys; labels, cells and T are constants.
    """
    return reference.attend_with_tail(
        query,
        key,
        value,
        labels,
        cell,
        keys,
        clusters=clusters,
        topk=topk,
        cells=cells,
        scale=scale,
        wanted=wanted,
        dropout_p=dropout_p,
    )


@attend_with_tail.compiled
def _(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    labels: Tensor,
    cell: Tensor,
    keys: Tensor | None,
    *,
    clusters: int,
    topk: int,
    cells: int,
    scale: float,
    wanted: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    topk = torch.sym_min(topk, key.shape[2]) if keys is None else keys.shape[3]
    given = query, key, value, labels, cell, keys, wanted, None
    out, lse, *_ = tail_forward(backend, *given, clusters, topk, cells, scale)
    return out, lse


@Operator
def tail_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    labels: Tensor,
    cell: Tensor,
    keys: Tensor | None,
    wanted: Tensor | None,
    cell_means: Tensor | None,
    clusters: int,
    topk: int,
    cells: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate (out, lse), and what the backward pass needs: lists of tokens, means, and the cells as they see them.

    The gradient flows through the cells too, not through the means. With `cell_means`, (B,G,X,D) in fp32, distances are
    from these.
    """
    (B, H, N, D), (_, G, M, E), C, X = query.shape, value.shape, clusters, cells
    if clusters < 1 or cells < 1 or topk < 0:
        raise ValueError(
            f"tail_forward: clusters={C}, cells={X} and topk={topk}, but there must be 1, 1 and 0 at least"
        )
    lists = (B, H, N), (B, H, C + 1), (B, G, M), (B, G, X + 1), (B, H, C, topk)
    numbers = (B, H, N), (B, H, C, D), (B, H, C, X, D), (B, H, C, X, E), (B, H, C, X)
    order, offsets, key_order, cell_offsets, top = (query.new_empty(shape, dtype=torch.int32) for shape in lists)
    lse, means, cell_keys, cell_values, cell_lse = (query.new_empty(shape, dtype=torch.float32) for shape in numbers)
    saved = order, offsets, key_order, cell_offsets, top, means, cell_keys, cell_values, cell_lse
    return token_major(query, E), lse, *saved


tail_backward = Gradient(tail_forward, "query", "key", "value", named="attention with a tail")


@tail_forward.flops
def _(x: Any) -> int:
    """Operations of the products: of means with all keys, of queries with exact keys and cells."""
    (B, H, N, D), E = x.query, x.value[3]
    of_cells = x.clusters * x.value[2] * (2 * D + E)
    return 2 * B * H * (of_cells + N * (x.topk + x.cells) * (D + E))


@tail_backward.flops
def _(x: Any) -> int:
    """The logits again, the gradients of both sides of all products."""
    (B, H, N, D), E = x.query, x.value[3]
    of_cells = x.clusters * x.value[2] * (5 * D + 2 * E)
    return 2 * B * H * (of_cells + N * (x.topk + x.cells) * (3 * D + 2 * E))
