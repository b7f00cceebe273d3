"""K-means of hash codes in compiled code."""

import torch
from torch import Tensor

from subquad.ops.choose.kmeans.op import hamming_kmeans, kmeans_labels
from subquad.ops.native import interface
from subquad.ops.native.interface import pointer


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
    codes, real = codes.contiguous(), None if real is None else real.contiguous()
    threads = interface.threads(B * H * N * clusters * (iterations + 1))
    sizes = interface.Sizes(B, H, H, N, N, 1, 1, clusters, 0, iterations, 0, threads)
    interface.run("kmeans", interface.Clustering(sizes, pointer(codes), pointer(real), pointer(labels)))
