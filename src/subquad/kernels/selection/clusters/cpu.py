"""Clusters of queries in compiled code."""

from typing import Any

import torch
from torch import Tensor

from subquad.core.randomness import orthogonal
from subquad.kernels.native import interface
from subquad.kernels.selection.clusters.op import cluster_labels, query_clusters


@query_clusters.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take these queries; None if it can."""
    return interface.refusal(x.query)


@cluster_labels.on("cpu")
def compute(labels: Tensor, x: Any) -> None:
    """The CPU backend of `query_clusters`."""
    (B, H, N, D), (_, G, M, _), dtype = x.query.shape, x.key.shape, x.query.dtype
    interface.check(
        "query_clusters",
        (H, G),
        key=(x.key, dtype, (B, G, M, D)),
        query_valid=(x.query_valid, torch.bool, (B, N)),
        key_valid=(x.key_valid, torch.bool, (B, M)),
        counts=(x.counts, torch.int64, (B,)),
    )
    cost = B * H * N * (x.clusters * (x.iterations + x.refine * D) + x.bits * D)
    interface.run(
        "query_clusters",
        **{"B": B, "H": H, "G": G, "N": N, "M": M, "D": D, "dtype": dtype, "threads": interface.threads(cost)},
        **{"clusters": x.clusters, "bits": x.bits, "iterations": x.iterations, "refine": x.refine},
        **{"logits": x.space == "logits", "query": x.query, "key": x.key},
        **{"query_valid": x.query_valid, "key_valid": x.key_valid, "counts": x.counts},
        planes=orthogonal(x.seed, x.bits, D, like=interface.FLOAT32),
        labels=labels,
    )
