"""The op `clustered_attention`: one torch operator a direction for the whole method."""

from typing import Any

import torch
from torch import Tensor

from subquad.core.versions import sym_min
from subquad.kernels.attention.clustered import reference
from subquad.kernels.dispatch import Op
from subquad.kernels.operators import Gradient
from subquad.kernels.tensors import token_major

clustered_attention = Op(reference.clustered_attention)

INPUTS = "query", "key", "value", "query_valid", "key_valid", "labels"
SETTINGS = "clusters", "topk", "bits", "iterations", "scale", "seed", "wants_lse"


@clustered_attention.compiled
def run(backend: str, x: Any) -> tuple[Tensor, Tensor | None]:
    """Run on a compiled backend, where `topk` are at most all keys."""
    inputs, topk = (
        (x.query, x.key, x.value, x.query_valid, x.key_valid, x.labels),
        sym_min(x.topk, x.key.shape[2]),
    )
    settings = x.clusters, topk, x.bits, x.iterations, x.scale, x.seed, x.wants_lse
    out, *_, lse = clustered_forward.run(backend, *inputs, *settings)
    return out, lse if x.wants_lse else None


@clustered_attention.operator(*INPUTS, *SETTINGS)
def clustered_forward(
    x: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the output, what the backward pass needs (order, offsets, top, centroids, rest, lse, mass, and the
    residual that rounding took from lse), and the queries' own log-sum-exp, empty unless it is wanted.
    """
    (B, H, N, D), E, C, topk = x.query.shape, x.value.shape[3], x.clusters, x.topk
    if topk < 0 or C < 1:
        raise ValueError(f"clustered_forward: clusters={C} and topk={topk}, but there must be 1 and 0 at least")
    order = x.query.new_empty(B, H, N, dtype=torch.int32)
    offsets = x.query.new_empty(B, H, C + 1, dtype=torch.int32)
    top = x.query.new_empty(B, H, C, topk, dtype=torch.int32)
    centroids, remaining, lse, mass, residual = (
        x.query.new_empty(B, H, C, *width, dtype=torch.float32) for width in ((D,), (E,), (), (), ())
    )
    of_queries = x.query.new_empty(B, H, N if x.wants_lse else 0, dtype=torch.float32)
    return token_major(x.query, E), order, offsets, top, centroids, remaining, lse, mass, residual, of_queries


clustered_backward = Gradient(clustered_forward, "query", "key", "value", title="clustered attention")


@clustered_forward.flops
def forward_flops(x: Any) -> int:
    """Operations of the products: hash, logits, weighted values."""
    B, H, N, D = x.query
    hashes = 2 * B * H * N * D * x.bits if x.labels is None else 0
    return hashes + 2 * _pairs(x) * (D + x.value[3])


@clustered_backward.flops
def backward_flops(x: Any) -> int:
    """The logits again and the gradients of both their sides; the gradients of weights and values."""
    return 2 * _pairs(x) * (3 * x.query[3] + 2 * x.value[3])


def _pairs(x: Any) -> int:
    """The query-key pairs that are computed: of centroids with all keys, of queries with their top keys."""
    B, H, N, _ = x.query
    return B * H * (x.clusters * x.value[2] + N * x.topk)
