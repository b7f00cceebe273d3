"""The op `nearest_clusters`."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.dispatch import Op
from subquad.kernels.selection.nearest import reference

nearest_clusters = Op(reference.nearest_clusters)

INPUTS = "query", "key", "means", "sizes", "query_valid", "key_valid"


@nearest_clusters.compiled
def run(backend: str, x: Any) -> Tensor:
    """Run on a compiled backend: nothing is differentiated."""
    means = x.means.detach().float().contiguous()
    inputs = x.query.detach(), x.key.detach(), means, x.sizes.contiguous(), x.query_valid, x.key_valid
    labels: Tensor = nearest_labels.run(backend, *inputs)
    return labels


@nearest_clusters.operator(*INPUTS)
def nearest_labels(x: Any) -> Tensor:
    """Allocate the labels."""
    labels: Tensor = x.query.new_empty(x.query.shape[:3], dtype=torch.int64)
    return labels
