"""The tokens that score highest in each bucket are the same wherever the tokens are."""

from itertools import pairwise

import pytest
import torch

from subquad.distributed.selection.top import candidates, choosing, taken
from subquad.kernels.selection.hash_functions import Hashed, HashFunction
from subquad.kernels.selection.top.op import top_and_best
from subquad.kernels.tokens.slots import vectors_at
from subquad.testing.oracle import normal

BORDERS = 0, 5, 6, 17, 30
N = BORDERS[-1]


def of_ranks(scores: list, K: int, valid: torch.Tensor, *, odds: bool) -> torch.Tensor:
    """The tokens that each bucket takes, in ascending order and numbered as on one rank; N for none."""
    parts = [slice(start, stop) for start, stop in pairwise(BORDERS)]
    each = [candidates(own, K, valid[:, part], odds=odds) for own, part in zip(scores, parts, strict=True)]
    rows = [choosing(x.scores, K, [part.stop - part.start for part in parts]) for x in each]
    slots = rows[0].combine(torch.stack([x.local.flatten(0, -2) for x in rows]))[0].view(2, 3, 4, -1)
    found = []
    for rank, (part, own) in enumerate(zip(parts, each, strict=True)):
        found.append(torch.where(taken(slots, own.scores, rank).mine, own.tokens + part.start, N))
    return torch.cat(found, dim=3).sort(-1).values


@pytest.mark.parametrize("odds", [False, True])
@pytest.mark.parametrize("K", [1, 4, 40])
def test_ranks_take_the_tokens_that_one_rank_takes(K: int, odds: bool):
    # Seven different tokens: many scores are equal, within ranks and between them.
    scores = normal(2, 3, 7, 4)[:, :, torch.arange(N) ** 2 % 7]
    valid = torch.arange(N) < torch.tensor([N, 9])[:, None]
    want, best = top_and_best(scores, valid.sum(1).clamp(max=K), min(K, N), valid, odds=odds)
    parts = [scores[:, :, start:stop] for start, stop in pairwise(BORDERS)]
    have = of_ranks(parts, K, valid, odds=odds)
    assert torch.equal(have[..., : want.shape[3]], want)
    assert (have[..., want.shape[3] :] == N).all()
    whole = torch.cat([candidates(x, K, None, odds=odds).best for x in parts], dim=2)
    assert torch.equal(whole.where(valid[:, None], 0), best)


def test_scores_of_hash_functions_are_computed_for_candidates_alone():
    function = HashFunction(2, 8, 5, "mlp", 6, seed=1)
    x, tokens = normal(2, 2, N, 8), torch.randint(0, N, (2, 4, 7), generator=torch.Generator().manual_seed(0))
    hashed = Hashed(((function, x), (function, x * 2)), heads=4, root=0.7)
    every = hashed.scores().gather(2, tokens[..., None].expand(-1, -1, -1, 5))
    torch.testing.assert_close(hashed.at(tokens), every)


def test_heads_that_share_vectors_choose_their_own():
    x, slots = normal(2, 2, 6, 3), torch.randint(0, 7, (2, 4, 2, 3), generator=torch.Generator().manual_seed(0))
    assert torch.equal(vectors_at(x, slots), vectors_at(x.repeat_interleave(2, dim=1), slots))
