"""The tokens that score highest in each bucket, of tokens that are split over ranks.

A bucket takes a number K of tokens that does not grow with the length. So the best of all ranks are among the K best of
each rank, which are found where they are, and one exchange of their scores decides: no threshold is searched for.

    rank 0    9.1  7.5  2.0          rank 1    8.8  3.1  3.0          K = 3
    taken     yes  yes  no                     yes  no   no
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from subquad.ops.choose.top.op import top_and_best
from subquad.ops.choose.top.reference import log_odds
from subquad.ops.hash_functions import Hashed
from subquad.ops.timeline import real_lengths


class Candidates(NamedTuple):
    """This rank's tokens that score highest in each bucket.

    Attributes:
        tokens: in ascending order; an empty slot holds the number of tokens.
        scores: what they are ranked by; −inf for an empty slot.
        best: the bucket that each token scores highest.
    """

    tokens: Int64[Tensor, "B H C k"]
    scores: Float[Tensor, "B H C k"]
    best: Int64[Tensor, "B H N"]


class Taken(NamedTuple):
    """The tokens of all ranks that a bucket takes, the highest score first.

    Attributes:
        own: which of this rank's candidates they are.
        place: where they stand among the candidates of all ranks, one rank after the other.
        there: False where there are fewer tokens.
    """

    own: Bool[Tensor, "B H C k"]
    place: Int64[Tensor, "B H C K"]
    there: Bool[Tensor, "B H C K"]


@torch.no_grad()
def candidates(
    scores: Float[Tensor, "B H N C"] | Hashed, most: int, real: Bool[Tensor, "B N"] | None, *, odds: bool
) -> Candidates:
    """The `most` tokens of this rank that score highest in each bucket; `odds` as in `top_and_best`."""
    B, _, N, _ = scores.shape
    most = min(most, N)
    sizes = real_lengths(real, B, N, scores.device).clamp(max=most)
    tokens, best = top_and_best(scores, sizes, most, real, odds=odds)
    empty = tokens == N
    found = _scores_at(scores, tokens.clamp(max=N - 1).flatten(2))
    found = (log_odds(found) if odds else found).unflatten(2, tokens.shape[2:])  # of which a bucket reads its own
    found = found.diagonal(dim1=2, dim2=4).movedim(-1, 2)
    return Candidates(tokens, found.masked_fill(empty, -torch.inf), best)


def taken(scores: list[Float[Tensor, "B H C _"]], K: int, rank: int) -> Taken:
    """The K candidates that score highest in each bucket; of equal ones those in front."""
    every = torch.cat(scores, dim=3)
    found, place = (x[..., :K] for x in every.sort(dim=-1, descending=True, stable=True))
    there = ~torch.isneginf(found)
    among = torch.zeros_like(every, dtype=torch.bool).scatter(3, place, there)
    return Taken(among.split([x.shape[3] for x in scores], dim=3)[rank], place, there)


def _scores_at(scores: Tensor | Hashed, tokens: Int64[Tensor, "B H S"]) -> Float[Tensor, "B H S C"]:
    """The scores of these tokens in all buckets."""
    if isinstance(scores, Hashed):
        return scores.at(tokens)
    return scores.gather(2, tokens[..., None].expand(-1, -1, -1, scores.shape[3]))
