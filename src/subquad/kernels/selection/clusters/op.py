"""The op `query_clusters`."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.dispatch import Op
from subquad.kernels.selection.clusters import reference

query_clusters = Op(reference.query_clusters)

INPUTS = "query", "key", "query_valid", "key_valid", "counts"
SETTINGS = "space", "clusters", "bits", "iterations", "refine", "seed"


@query_clusters.compiled
def run(backend: str, x: Any) -> Tensor:
    """Run on a compiled backend: nothing is differentiated."""
    inputs = x.query.detach(), x.key.detach(), x.query_valid, x.key_valid, x.counts
    settings = x.space, x.clusters, x.bits, x.iterations, x.refine, x.seed
    labels: Tensor = cluster_labels.run(backend, *inputs, *settings)
    return labels


@query_clusters.operator(*INPUTS, *SETTINGS)
def cluster_labels(x: Any) -> Tensor:
    """Allocate the labels."""
    if x.clusters < 1:
        raise ValueError(f"query_clusters: clusters={x.clusters}, but there must be 1 at least")
    labels: Tensor = x.query.new_empty(x.query.shape[:3], dtype=torch.int64)
    return labels
