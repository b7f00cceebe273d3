"""The nearest cluster of each query in compiled code."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.native import interface
from subquad.kernels.selection.nearest.op import nearest_clusters, nearest_labels


@nearest_clusters.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take these queries; None if it can."""
    return interface.refusal(x.query)


@nearest_labels.on("cpu")
def compute(labels: Tensor, x: Any) -> None:
    """The CPU backend of `nearest_clusters`."""
    (B, H, N, D), (_, G, M, _), C, dtype = x.query.shape, x.key.shape, x.means.shape[2], x.query.dtype
    interface.check(
        "nearest_clusters",
        (H, G),
        key=(x.key, dtype, (B, G, M, D)),
        means=(x.means, torch.float32, (B, H, C, D)),
        sizes=(x.sizes, torch.int64, (B, H, C)),
        query_valid=(x.query_valid, torch.bool, (B, N)),
        key_valid=(x.key_valid, torch.bool, (B, M)),
    )
    threads = interface.threads(B * H * D * (N * C + M * D))
    interface.run(
        "nearest_clusters",
        **{"B": B, "H": H, "G": G, "N": N, "M": M, "D": D, "clusters": C, "dtype": dtype, "threads": threads},
        **{"query": x.query, "key": x.key, "means": x.means, "sizes": x.sizes},
        **{"query_valid": x.query_valid, "key_valid": x.key_valid, "labels": labels},
    )
