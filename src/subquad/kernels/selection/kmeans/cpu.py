"""K-means of hash codes in compiled code."""

from typing import Any

import torch
from torch import Tensor

from subquad.kernels.native import interface
from subquad.kernels.selection.kmeans.op import hamming_kmeans, kmeans_labels


@hamming_kmeans.refusal("cpu")
def refusal(x: Any) -> str | None:
    """The reason why the compiled kernel cannot take these codes; None if it can."""
    return interface.refusal(x.codes, any_dtype=True)


@kmeans_labels.on("cpu")
def compute(labels: Tensor, x: Any) -> None:
    """The CPU backend of `hamming_kmeans`."""
    B, H, N = x.codes.shape
    interface.check("hamming_kmeans", codes=(x.codes, torch.int64, (B, H, N)), valid=(x.valid, torch.bool, (B, N)))
    if x.clusters < 1:
        raise ValueError(f"hamming_kmeans: clusters={x.clusters}, but there must be 1 at least")
    threads = interface.threads(B * H * N * x.clusters * (x.iterations + 1))
    interface.run("kmeans", B=B, H=H, N=N, threads=threads, labels=labels, **x._asdict())
