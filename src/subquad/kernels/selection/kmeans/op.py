"""The op `hamming_kmeans`."""

from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from subquad.kernels.dispatch import Op
from subquad.kernels.selection.kmeans import reference


@Op
def hamming_kmeans(
    codes: Int64[Tensor, "B H N"],
    valid: Bool[Tensor, "B N"] | None,
    clusters: int,
    bits: int,
    iterations: int,
) -> Int64[Tensor, "B H N"]:
    """Lloyd's algorithm on {0,1}^bits: assign to the nearest centroid code, then majority vote of every bit.

    Deterministic: the start is `clusters` evenly spaced real positions of each item, the lowest cluster number wins a
    tie of distances, and a tied bit or an empty cluster keeps its old value. After `iterations` rounds comes one more
    assignment. An item with no more real positions than clusters skips all this: each position is its own cluster.

    Returns labels in [0, clusters), and `clusters` for padding: "in no cluster". All backends give the same labels.
    """
    return reference.hamming_kmeans(codes, valid, clusters, bits, iterations)


@hamming_kmeans.compiled
def run(backend: str, x: Any) -> Tensor:
    """Run on a compiled backend, which needs no number of bits: bits that no code uses change nothing."""
    labels: Tensor = kmeans_labels.run(backend, x.codes, x.valid, x.clusters, x.iterations)
    return labels


@hamming_kmeans.operator("codes", "valid", "clusters", "iterations")
def kmeans_labels(x: Any) -> Tensor:
    """Allocate the labels."""
    return torch.empty_like(x.codes, memory_format=torch.contiguous_format)
