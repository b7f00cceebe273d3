"""Centroids of spherical k-means that follow the vectors they are given."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from subquad.core.randomness import normal
from subquad.kernels.tensors import one_hot
from subquad.kernels.transforms import check_can_change

DECAY = 0.999  # of the moving average, Roy et al.'s


class Centroids(nn.Module):
    """Unit vectors μ for each head, a state that `follow` updates, without gradient.

        score_c(x) = x̂·μ_c,  x̂ = x/‖x‖
        μ_c ← unit(0.999 μ_c + 0.001 unit(Σ x̂)),  the sum over the vectors that are nearest to c; none: μ_c stays

    They start as random directions, drawn from the seed, and are saved with the module.
    """

    centroids: Tensor
    by_query_head: ClassVar[tuple[str, ...]] = ("centroids",)

    def __init__(self, heads: int, width: int, clusters: int, seed: int):
        super().__init__()
        drawn = normal(seed, heads * clusters, width, like=torch.zeros(1)).view(heads, clusters, width)
        self.register_buffer("centroids", F.normalize(drawn, dim=-1))

    def forward(self, x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N C"]:
        """Return the scores of x, in its dtype."""
        return F.normalize(x, dim=-1) @ self.centroids.to(x.dtype).transpose(-1, -2)

    @torch.no_grad()
    def follow(self, x: Float[Tensor, "B H N D"], valid: Bool[Tensor, "B N"] | None) -> None:
        """Move towards these vectors, of all items together, in all processes; padded vectors are skipped."""
        check_can_change(self.centroids, "the state of 'routing', its centroids,")
        nearest = one_hot(self(x).argmax(-1), self.centroids.shape[1]).to(x.dtype)
        nearest = nearest if valid is None else nearest * valid[:, None, :, None]
        # Not a product with 0: what padding holds may be infinite.
        unit = F.normalize(x if valid is None else x.masked_fill(~valid[:, None, :, None], 0.0), dim=-1)
        sums = torch.einsum("bhnc,bhnd->hcd", nearest, unit).to(self.centroids.dtype)
        counts = nearest.sum((0, 2))
        if _among_processes():  # each has a part of the batch, and all centroids stay equal
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(counts)
        moved = F.normalize(DECAY * self.centroids + (1 - DECAY) * F.normalize(sums, dim=-1), dim=-1)
        self.centroids.copy_(torch.where(counts[..., None] > 0, moved, self.centroids))


def _among_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
