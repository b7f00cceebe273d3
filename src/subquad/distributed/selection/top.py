"""The tokens that score highest in each bucket, of tokens that are split over ranks.

A bucket takes a number K of tokens that does not grow with the length. So the best of all ranks are among the K best of
each rank, which are found where they are, and their scores decide: no threshold is searched for. Each of the K slots of
a bucket gets the number of a rank, from which this rank knows which of its candidates is there, because it knows
the order of its own.

    rank 0    9.1  7.5  2.0          rank 1    8.8  3.1  3.0          K = 3
    slots     rank 0 (9.1)   rank 1 (8.8)   rank 0 (7.5)

Then the vectors of what is taken travel as a sum: each rank puts its own into their slots, and 0 into all others.
"""

from collections.abc import Sequence as Many
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int16, Int64
from torch import Tensor

from subquad.distributed.rows import Rows, combine_together
from subquad.distributed.token_split import TokenSplit
from subquad.kernels.precision import upcast
from subquad.kernels.selection.hash_functions import Hashed
from subquad.kernels.selection.top.op import top_and_best
from subquad.kernels.selection.top.reference import log_odds
from subquad.kernels.tokens.positions import valid_lengths


class Candidates(NamedTuple):
    """This rank's tokens that score highest in each bucket.

    Attributes:
        tokens: in ascending order; an empty slot holds the number of tokens.
        scores: the scores that they are ranked by; −inf for an empty slot.
        best: the bucket that each token scores highest.
    """

    tokens: Int64[Tensor, "B H C k"]
    scores: Float[Tensor, "B H C k"]
    best: Int64[Tensor, "B H N"]


class Taken(NamedTuple):
    """The candidates of all ranks that a bucket takes, in slots, the highest score first.

    Attributes:
        rank: the rank of the candidate in each slot; −1 in an empty one.
        candidate: its number among this rank's candidates; k if it is another rank's.
        mine: True for those of this rank's candidates that are taken.
    """

    rank: Int64[Tensor, "B H C K"]
    candidate: Int64[Tensor, "B H C K"]
    mine: Bool[Tensor, "B H C k"]

    @property
    def filled(self) -> Bool[Tensor, "B H C K"]:
        """A bool that marks the slots that are filled."""
        return self.rank >= 0

    def in_slots(self, rows: Float[Tensor, "B H C k F"]) -> Float[Tensor, "B H C K F"]:
        """The vectors of this rank's candidates in their slots, and 0 in the others: the sum over ranks fills all."""
        none = self.candidate == rows.shape[3]
        at = self.candidate.masked_fill(none, 0).unsqueeze(-1).expand(-1, -1, -1, -1, rows.shape[4])
        return rows.gather(3, at).masked_fill(none.unsqueeze(-1), 0.0)


@torch.no_grad()
def candidates(
    scores: Float[Tensor, "B H N C"] | Hashed, most: int, valid: Bool[Tensor, "B N"] | None, *, odds: bool
) -> Candidates:
    """The `most` tokens of this rank that score highest in each bucket; `odds` as in `top_and_best`."""
    B, _, N, _ = scores.shape
    most = min(most, N)
    sizes = valid_lengths(valid, B, N, scores.device).clamp(max=most)
    tokens, best = top_and_best(scores, sizes, most, valid, odds=odds)
    empty = tokens == N
    candidate_scores = _scores_at(scores, tokens.clamp(max=N - 1).flatten(2))
    candidate_scores = (log_odds(candidate_scores) if odds else candidate_scores).unflatten(
        2, tokens.shape[2:]
    )  # of which a bucket reads its own
    candidate_scores = candidate_scores.diagonal(dim1=2, dim2=4).movedim(-1, 2)
    return Candidates(tokens, candidate_scores.masked_fill(empty, -torch.inf), best)


def choose(scores: Float[Tensor, "B H C k"], K: int, lengths: Many[int], split: TokenSplit) -> Taken:
    """The K candidates of all ranks with the highest scores, of equal ones those in front; `lengths` as in `choosing`.

    One exchange, or two of many bytes.
    """
    (chosen,) = combine_together([choosing(scores, K, lengths)], split.group)
    return taken(chosen, scores, split.rank)


def choosing(scores: Float[Tensor, "B H C k"], K: int, lengths: Many[int]) -> Rows:
    """The scores as rows, of which `taken` reads what is made; `lengths` are the numbers of tokens of the ranks.

    They travel as integers, which have no gradient that would have to come back.
    """
    (scores,) = upcast(scores.detach())
    even = F.pad(scores, (0, min(K, max(lengths)) - scores.shape[3]), value=-torch.inf)
    bits = torch.int64 if scores.dtype == torch.float64 else torch.int32
    return Rows(even.contiguous().view(bits), partial(_ranks_in_slots, scores.dtype, min(K, sum(lengths))))


def _ranks_in_slots(dtype: torch.dtype, K: int, every: Tensor) -> list[Int16[Tensor, "n K"]]:
    ranks, _, width = every.shape
    ordered, slot = every.view(dtype).transpose(0, 1).flatten(1).sort(dim=-1, descending=True, stable=True)
    rank = torch.where(torch.isneginf(ordered), -1, slot // width)[:, :K]
    return [rank.to(torch.int16)] * ranks


def taken(slots: Int16[Tensor, "B H C K"], scores: Float[Tensor, "B H C k"], rank: int) -> Taken:
    """The tokens of each bucket, by `choosing`; the scores are those of this rank's candidates."""
    of_rank, k = slots.long(), scores.shape[3]
    order = scores.detach().sort(dim=-1, descending=True, stable=True).indices
    here = of_rank == rank
    candidate = torch.where(here, order.gather(3, (here.cumsum(-1) - 1).clamp(0, k - 1)), k)
    mine = torch.zeros(*scores.shape[:3], k + 1, dtype=torch.bool, device=candidate.device).scatter(3, candidate, True)
    return Taken(of_rank, candidate, mine[..., :k])


def _scores_at(scores: Tensor | Hashed, tokens: Int64[Tensor, "B H S"]) -> Float[Tensor, "B H S C"]:
    """The scores of these tokens in all buckets."""
    if isinstance(scores, Hashed):
        return scores.at(tokens)
    return scores.gather(2, tokens[..., None].expand(-1, -1, -1, scores.shape[3]))
