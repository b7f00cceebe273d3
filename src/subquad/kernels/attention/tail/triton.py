"""Attention to exact keys and a tail of cells on GPUs.

    queries by cluster, keys by cell      counting sorts                                 `kernels.triton.groups`
    q̄ of each cluster                     means by cluster                               `kernels.triton.groups`
    T: exact keys of each cluster         maxima of blocks, then candidates              `kernels.triton.selection`
    k̄, v̄, λ of each cell and cluster      one softmax for each, over the cell's keys     `kernels.triton.cells`
    out, lse                              one softmax over T and the cells               `kernels.triton.members`

The backward pass goes through the same stages from the last to the first. q̄ is rounded to the dtype of the queries:
an expansion around the rounded mean is as good as one around the mean.
"""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.tail.key_choice import (
    FARTHEST,
    NEAREST,
    covariance_in_clusters,
    mean_of_keys,
    weights_around,
)
from subquad.kernels.attention.tail.op import attend_with_tail, tail_backward, tail_forward, tail_output
from subquad.kernels.attention.tail.visible_key_cells import lists_of, visible_key_cells
from subquad.kernels.precision import upcast
from subquad.kernels.tokens.heads import repeat_heads
from subquad.kernels.triton import refusal_of
from subquad.kernels.triton.cells.backward import cells_backward
from subquad.kernels.triton.cells.forward import see_cells
from subquad.kernels.triton.groups import Members
from subquad.kernels.triton.lists import inside_words, log_distances
from subquad.kernels.triton.members.cell_gradients import cells_of_members
from subquad.kernels.triton.members.clustering import Clustering
from subquad.kernels.triton.members.gradients import MemberGradients
from subquad.kernels.triton.members.listed import listed_backward
from subquad.kernels.triton.members.members_forward import attend_members
from subquad.kernels.triton.members.queries import members_backward
from subquad.kernels.triton.selection import choose_top


@attend_with_tail.refusal("triton")
def refusal(x: Any) -> str | None:
    """The reason why the kernels cannot take this call; None if they can."""
    if x.dropout_p > 0:
        return f"dropout_p={x.dropout_p}, and the kernels have no dropout"
    if x.window > 0:
        return f"window={x.window}, and the kernels have no near keys"
    return refusal_of(x.query, x.key, x.value)


@visible_key_cells.refusal("triton")
def refusal_of_few(x: Any) -> str | None:
    """The reason why the kernels cannot take these queries; None if they can."""
    return refusal_of(x.query, x.key, x.value)


@lists_of("triton")
def numbers(top: Tensor, key_order: Tensor, keys: int) -> Tensor:
    """They are numbers of keys already."""
    return top.long()


@tail_forward.on("triton")
def forward(outputs: tuple[Tensor, ...], x: Any) -> None:
    """The output, its log-sum-exp, and what the backward pass needs."""
    out, lse, *saved = outputs
    order, offsets, key_order, cell_offsets, top, centroids, cell_keys, cell_values, cell_lse, *_ = saved
    queries, keys = Members.from_labels(x.labels, x.clusters, x.query), Members.from_labels(x.cell, x.cells, x.key)
    rank = torch.empty_like(key_order)
    queries.fill_order(order, offsets)
    keys.fill_order(key_order, cell_offsets, rank)
    if x.means is None:
        queries.fill_means(centroids, like=x.query)
    else:
        centroids.copy_(x.means.to(x.query.dtype))
    if x.keys is None:
        _fill_top(x, centroids, keys, top)
    else:
        top.copy_(x.keys)
    inside = inside_words(top, key_order, rank)
    cells = cell_keys, cell_values, cell_lse
    see_cells(centroids, x.key, x.value, key_order, cell_offsets, inside, x.scale, cells)
    attend_members(x.query, x.key, x.value, Clustering(order, offsets, centroids, top, cells), x.scale, out, lse)


@tail_output.on("triton")
def output(outputs: tuple[Tensor, Tensor], x: Any) -> None:
    """The output and its log-sum-exp alone."""
    forward((*outputs, *tail_forward.outputs(x)[2:]), x)


def _fill_top(x: Any, centroids: Tensor, keys: Members, top: Tensor) -> None:
    """The keys with the largest score, ascending; M where a slot is empty."""
    if x.topk == 0:
        return
    means = centroids.new_empty(*x.key.shape[:2], x.cells, x.key.shape[3])
    keys.fill_means(means)
    distances, present = log_distances(x.key, x.cell, means, NEAREST, FARTHEST)
    terms = x.terms
    if terms is None:
        query, key = upcast(x.query, x.key)
        around = covariance_in_clusters(query, x.labels, centroids) if x.around is None else x.around
        terms = weights_around(key - mean_of_keys(key, x.cell, x.cells), around, x.scale)
        terms = terms + repeat_heads(distances[:, :, None], query.shape[1])[:, :, 0]
    choose_top(centroids, x.key, terms.contiguous(), present, x.scale, top, x.wanted)


@tail_backward.on("triton")
def backward(grads: tuple[Tensor, Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key and value, and of means that are not those of the queries."""
    (out, lse, *lists), (grad_out, grad_lse, *_, from_keys, from_values, from_lse, _, _, _, _) = x.outputs, x.grads
    order, offsets, key_order, cell_offsets, top, centroids, cell_keys, cell_values, cell_lse, *_ = lists
    grad_query, grad_key, grad_value, grad_means = grads
    clusters = Clustering(order, offsets, centroids, top, (cell_keys, cell_values, cell_lse))
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    rho = torch.linalg.vecdot(grad_out.float(), out.float())
    of_members = MemberGradients(lse, rho if grad_lse is None else rho - grad_lse, grad_out)

    of_keys, of_values, of_lse = cells_of_members(x.query, clusters, x.scale, of_members)
    of_bias = of_lse  # of the members alone: others read λ itself, not its difference to q̄·k̄
    of_keys, of_values, of_lse = (
        _with_others(gradient, of_others, cell_lse)
        for gradient, of_others in ((of_keys, from_keys), (of_values, from_values), (of_lse, from_lse))
    )
    constant = of_lse - torch.linalg.vecdot(of_keys, cell_keys) - torch.linalg.vecdot(of_values, cell_values)
    of_means = cells_backward(
        x,
        centroids,
        key_order,
        cell_offsets,
        inside_words(top, key_order),
        cell_lse,
        (of_keys, of_values, constant, None),
        listed_backward(x.query, x.key, x.value, clusters, x.scale, of_members) if x.topk else None,
        (grad_key, grad_value),
    )
    of_means = of_means - x.scale * (of_bias[..., None] * cell_keys).sum(3)
    if x.means is not None:
        grad_means.copy_(of_means)
        of_means = torch.zeros_like(of_means)
    members_backward(x.query, x.key, x.value, clusters, x.scale, of_members, of_means, grad_query)


def _with_others(gradient: Tensor, of_others: Tensor | None, cell_lse: Tensor) -> Tensor:
    """Gradients of cells with those from others who read them; none where a cell has no keys."""
    if of_others is None:
        return gradient
    present = ~torch.isneginf(cell_lse)
    return gradient + of_others.where(present if gradient.ndim == present.ndim else present[..., None], 0.0)
