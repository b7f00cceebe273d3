"""K-means of hash codes that are split over ranks, of several problems in step, so that they share their exchanges."""

from collections.abc import Sequence as Several
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from subquad.distributed.selection.moments_of_ranks import Whole
from subquad.distributed.together import add_together
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.selection.kmeans.reference import keep_valid, ranks_and_counts
from subquad.kernels.selection.shards.op import WORD, assign_codes
from subquad.kernels.selection.shards.reference import words_of


@dataclass(frozen=True)
class Codes:
    """The codes of this rank's tokens, and what `hamming_kmeans` needs to know of those of all ranks."""

    codes: Int64[Tensor, "B H N"]
    valid: Bool[Tensor, "B N"] | None
    whole: Whole
    clusters: int
    iterations: int

    def starts(self) -> Int64[Tensor, "B H C"]:
        """The first centroids that are on this rank, the others being 0: the tokens with ranks ⌊c·count/C⌋."""
        B, H, N = self.codes.shape
        rank, count = ranks_and_counts(self.valid, B, N, self.codes.device)
        wanted = torch.arange(self.clusters, device=self.codes.device) * self.whole.count[:, None] // self.clusters
        wanted = wanted - self.whole.before[:, None]
        here = (wanted >= 0) & (wanted < count[:, None])
        # The first position that reaches a rank is a real one: a pad has the rank of the last real token before it.
        at = torch.searchsorted(rank.contiguous(), wanted).clamp(max=N - 1)
        return self.codes.gather(2, at[:, None].expand(B, H, -1)).where(here[:, None], 0)

    def labels(self, centroids: Int64[Tensor, "B H C"]) -> Int64[Tensor, "B H N"]:
        """The labels for the last centroids."""
        return self.settled(assign_codes(self.codes, centroids, self.valid)[0])

    def settled(self, labels: Int64[Tensor, "B H N"]) -> Int64[Tensor, "B H N"]:
        """The labels, of which those of an item with no more tokens than clusters are the numbers of the tokens."""
        B, _, N = labels.shape
        rank, _ = ranks_and_counts(self.valid, B, N, labels.device)
        alone = (self.whole.count <= self.clusters)[:, None, None]
        return keep_valid(
            torch.where(alone, (rank + self.whole.before[:, None])[:, None], labels), self.valid, self.clusters
        )


def kmeans_of_ranks(problems: Several[Codes], split: TokenSplit) -> list[Int64[Tensor, "B H N"]]:
    """The labels of each problem, as `hamming_kmeans` gives them: one exchange for the starts and each iteration.

    A problem whose centroids stay as they are has ended, because nothing will change any more.
    """
    centroids = add_together([problem.starts() for problem in problems], split.group)
    moving = list(range(len(problems)))
    for i in range(max(problem.iterations for problem in problems)):
        moving = [n for n in moving if i < problems[n].iterations]
        if not moving:
            break
        votes = [assign_codes(problems[n].codes, centroids[n], problems[n].valid)[1] for n in moving]
        old = list(centroids)
        for n, of_all in zip(moving, add_together(votes, split.group), strict=True):
            centroids[n] = _majority(of_all, old[n])
        moving = [n for n in moving if _may_move(old[n], centroids[n])]
    return [problem.labels(means) for problem, means in zip(problems, centroids, strict=True)]


def _may_move(old: Int64[Tensor, "B H C"], new: Int64[Tensor, "B H C"]) -> bool:
    """True if centroids differ, which all ranks see alike; on a GPU to ask would take longer than to continue."""
    return old.device.type != "cpu" or not torch.equal(old, new)


def _majority(votes: Tensor, old: Int64[Tensor, "B H C"]) -> Int64[Tensor, "B H C"]:
    """The bits that most members have; the old ones where there are as many of each, or no members."""
    twice, members = 2 * votes[..., : WORD - 1], votes[..., WORD - 1 :]
    return words_of(twice > members) | (old & words_of(twice == members))
