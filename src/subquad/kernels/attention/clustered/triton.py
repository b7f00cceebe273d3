"""Clustered and improved clustered attention on GPUs.

    labels                          sign hashes and k-means, or as given                `kernels.selection`
    Q^c                             means of the queries by cluster                     `kernels.triton.groups`
    T: top keys of each cluster     maxima of blocks, then candidates                   `kernels.triton.selection`
    A^c V without T                 cells of CHUNK keys, merged by log-sum-exp          `kernels.triton.neighbour_cells`
    V̂                               m̂·softmax over T + the rest, for each member        `kernels.triton.members`

A centroid's weights are never stored. Q^c is rounded to the dtype of the queries, so that it meets the keys on tensor
cores. Labels outside of [0, clusters) are taken as "in no cluster": reading them to refuse them would wait for the
device.
"""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.attention.clustered.centroids import attend_and_list, lists_of
from subquad.kernels.attention.clustered.op import clustered_attention, clustered_backward, clustered_forward
from subquad.kernels.attention.clustered.reference import cluster_queries
from subquad.kernels.selection.group_means import broadcast
from subquad.kernels.triton import refusal_of
from subquad.kernels.triton.cells.backward import cells_backward
from subquad.kernels.triton.cells.forward import see_cells
from subquad.kernels.triton.groups import Members, group_sums
from subquad.kernels.triton.lists import inside_words
from subquad.kernels.triton.members.clustering import Clustering
from subquad.kernels.triton.members.gradients import MemberGradients
from subquad.kernels.triton.members.listed import listed_backward
from subquad.kernels.triton.members.members_forward import attend_members
from subquad.kernels.triton.members.queries import members_backward
from subquad.kernels.triton.members.sums import member_sums
from subquad.kernels.triton.neighbour_cells import merge_cells, neighbours
from subquad.kernels.triton.selection import choose_top

CHUNK = 1024  # keys that one program reads: more programs than clusters and heads alone would give


@clustered_attention.refusal("triton")
def refusal(x: Any) -> str | None:
    """The reason why the kernels cannot take this call; None if they can."""
    if x.dropout_p > 0:
        return f"dropout_p={x.dropout_p}, and the kernels have no dropout"
    return refusal_of(x.query, x.key, x.value)


@attend_and_list.refusal("triton")
def refusal_of_few(x: Any) -> str | None:
    """The reason why the kernels cannot take these queries; None if they can."""
    return refusal_of(x.query, x.key, x.value)


@lists_of("triton")
def numbers(top: Tensor, valid: Tensor | None, keys: int) -> Tensor:
    """They are numbers of keys already."""
    return top.long()


@clustered_forward.on("triton")
def forward(outputs: tuple[Tensor, ...], x: Any) -> None:
    """The output, what the backward pass needs, and the queries' log-sum-exps."""
    out, order, offsets, top, centroids, remaining, lse, mass, _, query_lse = outputs
    labels = _labels(x)
    queries = Members.from_labels(labels, x.clusters, x.query)
    queries.fill_order(order, offsets)
    queries.fill_means(centroids, like=x.query)
    of_top = lse.new_empty(lse.shape) if x.topk else None
    if x.topk:
        valid = None if x.key_valid is None else x.key_valid[:, None].expand(-1, x.key.shape[1], -1).contiguous()
        choose_top(centroids, x.key, None, valid, x.scale, top, lse=of_top)
    chunks = neighbours(x.key, x.key_valid, CHUNK)
    (B, H, C), E, X = lse.shape, remaining.shape[3], chunks.offsets.shape[2] - 1
    values, of_cells = remaining.new_empty(B, H, C, X, E), remaining.new_empty(B, H, C, X)
    inside = inside_words(top, chunks.order, chunks.rank) if x.topk else None
    see_cells(centroids, x.key, x.value, chunks.order, chunks.offsets, inside, x.scale, (None, values, of_cells))
    merge_cells(values, of_cells, chunks.offsets, of_top, (remaining, lse, mass))
    if x.topk == 0:
        out.copy_(broadcast(remaining, labels))
        if x.wants_lse:
            query_lse.copy_(broadcast(lse[..., None], labels)[..., 0])
        return
    clusters = Clustering(order, offsets, centroids, top, mass=mass, remaining=remaining)
    attend_members(x.query, x.key, x.value, clusters, x.scale, out, query_lse if x.wants_lse else None)


def _labels(x: Any) -> Tensor:
    if x.labels is None:
        settings = {"clusters": x.clusters, "bits": x.bits, "iterations": x.iterations, "seed": x.seed}
        labels = cluster_queries(x.query, x.query_valid, **settings)
    else:
        labels = x.labels.masked_fill((x.labels < 0) | (x.labels > x.clusters), x.clusters)
    return labels if x.query_valid is None else labels.masked_fill(~x.query_valid[:, None], x.clusters)


@clustered_backward.on("triton")
def backward(grads: tuple[Tensor, Tensor, Tensor], x: Any) -> None:
    """Gradients of query, key and value."""
    (out, order, offsets, top, centroids, remaining, lse, mass, _, _), (grad_out, *_, grad_lse) = x.outputs, x.grads
    grad_query, grad_key, grad_value = grads
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grad_lse = grad_lse if x.wants_lse else None
    clusters = Clustering(order, offsets, centroids, top, mass=mass, remaining=remaining)
    inputs = x.query, x.key, x.value, clusters, x.scale
    shift, rho = member_sums(*inputs, grad_out)
    of_members = MemberGradients(shift, rho, grad_out, grad_lse)

    of_remaining = group_sums(grad_out, order, offsets)
    of_lse = torch.zeros_like(rho) if grad_lse is None else grad_lse
    of_mass, of_lse = group_sums(torch.stack([rho, of_lse], 3), order, offsets).unbind(3)
    shared = torch.linalg.vecdot(of_remaining, remaining)  # Σ_j A_j ∂L/∂A_j
    if x.topk == 0:
        of_inside, shared = None, shared - of_lse
    else:
        of_mass = of_mass - of_lse / torch.where(mass == 0, torch.inf, mass)
        shared = shared + mass * of_mass
        of_inside = of_mass - shared
    chunks = neighbours(x.key, x.key_valid, CHUNK)
    cells = chunks.offsets.shape[2] - 1

    def of_cells(x: Tensor) -> Tensor:
        return x.unsqueeze(3).expand(*x.shape[:3], cells, *x.shape[3:]).contiguous()

    of_means = cells_backward(
        x,
        centroids,
        chunks.order,
        chunks.offsets,
        inside_words(top, chunks.order, chunks.rank) if x.topk else None,
        of_cells(lse),
        (None, of_cells(of_remaining), of_cells(-shared), of_inside),
        listed_backward(*inputs, of_members) if x.topk else None,
        (grad_key, grad_value),
    )
    members_backward(*inputs, of_members, of_means, grad_query)
