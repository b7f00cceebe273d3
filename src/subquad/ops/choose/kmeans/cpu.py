"""K-means of hash codes in compiled code."""

import torch
from torch import Tensor

from subquad.ops.choose.kmeans.op import hamming_kmeans, kmeans_labels
from subquad.ops.native import interface


@hamming_kmeans.refusal("cpu")
def refusal(codes: Tensor, *_: object) -> str | None:
    """Why the compiled kernel cannot take these codes; None where it can."""
    return interface.refusal_of_any_dtype(codes)


@kmeans_labels.on("cpu")
def compute(labels: Tensor, codes: Tensor, real: Tensor | None, clusters: int, iterations: int) -> None:
    """As `hamming_kmeans`."""
    B, H, N = codes.shape
    interface.check("hamming_kmeans", codes=(codes, torch.int64, (B, H, N)), real=(real, torch.bool, (B, N)))
    if clusters < 1:
        raise ValueError(f"hamming_kmeans: clusters={clusters}, but there must be 1 at least")
    interface.run(
        "kmeans",
        B=B,
        H=H,
        N=N,
        clusters=clusters,
        iterations=iterations,
        threads=interface.threads(B * H * N * clusters * (iterations + 1)),
        codes=codes,
        real=real,
        labels=labels,
    )
