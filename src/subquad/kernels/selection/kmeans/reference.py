"""K-means of hash codes in plain PyTorch."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.kernels.selection.hashing.op import unpack_signs
from subquad.kernels.transforms import in_onnx_export


def hamming_kmeans(
    codes: Int64[Tensor, "B H N"],
    valid: Bool[Tensor, "B N"] | None,
    clusters: int,
    bits: int,
    iterations: int,
    counts: Int64[Tensor, "B"] | None = None,
) -> Int64[Tensor, "B H N"]:
    """The reference of `hamming_kmeans`; with `counts`, item b has `counts[b]` of the clusters."""
    B, H, N = codes.shape
    rank, count = ranks_and_counts(valid, B, N, codes.device)
    wanted = torch.full_like(count, clusters) if counts is None else counts
    if counts is None and not in_onnx_export() and clusters >= N:  # ONNX keeps no side of a comparison of lengths
        labels = rank[:, None].expand(B, H, N)
    else:
        signs = unpack_signs(codes, bits)
        centroids = signs.gather(
            2, _starts(rank, count, clusters, wanted)[:, None, :, None].expand(B, H, clusters, bits)
        )
        for _ in range(iterations):
            labels = keep_valid(nearest(signs, centroids, wanted), valid, clusters)
            centroids = majority(votes_of(signs, labels, clusters), centroids)
        labels = torch.where((count <= wanted)[:, None, None], rank[:, None], nearest(signs, centroids, wanted))
    return keep_valid(labels, valid, clusters)


def nearest(
    signs: Float[Tensor, "B H N L"], centroids: Float[Tensor, "B H C L"], wanted: Int64[Tensor, "B"]
) -> Int64[Tensor, "B H N"]:
    """The nearest centroid of each code, the lowest of equally near ones."""
    C = centroids.shape[2]
    # signs·centroid = L − 2·(Hamming distance). Scaled by C and less the cluster's number, scores are distinct integers
    # (exact in fp32 while 64·C < 2²⁴), so that the lowest number wins ties on every device.
    tie_break = -torch.arange(C, device=signs.device, dtype=signs.dtype)
    scores = torch.matmul(signs, (centroids * C).transpose(-1, -2)) + tie_break
    absent = torch.arange(C, device=signs.device) >= wanted[:, None, None, None]
    return scores.masked_fill(absent, -torch.inf).argmax(-1)


def majority(votes: Float[Tensor, "B H C L"], old: Float[Tensor, "B H C L"]) -> Float[Tensor, "B H C L"]:
    """The signs that most members have; the old ones where there are as many of each, or no members."""
    return torch.where(votes == 0, old, votes.sign())


def votes_of(
    signs: Float[Tensor, "B H N L"], labels: Int64[Tensor, "B H N"], clusters: int
) -> Float[Tensor, "B H {clusters} L"]:
    """The sums of the members' signs."""
    B, H, _, L = signs.shape
    return signs.new_zeros(B, H, clusters + 1, L).scatter_add(2, labels[..., None].expand_as(signs), signs)[:, :, :-1]


def ranks_and_counts(valid: Tensor | None, B: int, N: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The number of each position among the item's real ones, (B,N), and their counts, (B,)."""
    if valid is None:
        return torch.arange(N, device=device).expand(B, N), torch.full((B,), N, device=device)
    return valid.cumsum(1) - 1, valid.sum(1)


def _starts(rank: Tensor, count: Tensor, clusters: int, of_item: Tensor) -> Int64[Tensor, "B C"]:
    """The positions of the real tokens with ranks ⌊c·count/C⌋, c = 0 … C−1, with C those of the item."""
    wanted = torch.arange(clusters, device=rank.device) * count[:, None] // of_item[:, None]
    # Ranks never fall along the sequence, and a pad has the rank of the last real token before it (−1 before the
    # first), so the first position that reaches the wanted rank is a real one.
    first = (rank[:, None] < wanted[..., None]).sum(-1)
    return first.clamp(max=rank.shape[1] - 1)


def keep_valid(labels: Tensor, valid: Tensor | None, clusters: int) -> Int64[Tensor, "B H N"]:
    """Labels of `clusters`, which is none, for padding."""
    return labels.contiguous() if valid is None else torch.where(valid[:, None], labels, clusters)
