"""The combination of a few rows across ranks, at once and by shares, and what each rank sends for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import subquad as sq
from subquad.distributed import collectives
from subquad.distributed.attention.merging import merging
from subquad.distributed.rows import Rows, combine_together, of_earlier, summed
from subquad.distributed.selection.top import choose
from subquad.kernels.attention.softmax import merge_partials
from subquad.testing.oracle import normal
from tests.library.distributed.ranks import far, gradient

ROWS, WIDTH = 24, 5


@contextmanager
def everything_by_shares() -> Iterator[None]:
    """Nothing is too small to be shared."""
    many, collectives.MANY = collectives.MANY, 0
    try:
        yield
    finally:
        collectives.MANY = many


def combined() -> dict[str, Any]:
    """Return the errors, the bits, and what is sent forward and backward, for each kind of rows."""
    ranks = dist.get_world_size()
    parts = [normal(2, ROWS // 2, WIDTH, seed=seed) for seed in range(ranks)]
    found: dict[str, Any] = {}
    for way, context in (("at once", nullcontext), ("by shares", everything_by_shares)):
        with context():
            found[way] = {name: _tried(parts, *kind) for name, kind in KINDS.items()}
            found[way]["mixed"] = _mixed(parts)
            found[way]["chosen"] = _chosen()
    return found


def _merged(parts: list[Tensor], rank: int) -> Tensor:
    out, lse = merge_partials([(part[..., :-1], part[..., -1]) for part in parts])
    return torch.cat([out, lse.unsqueeze(-1)], dim=-1)


KINDS: dict[str, tuple[Callable[[Tensor], Rows], Callable[[list[Tensor], int], Tensor]]] = {
    "summed": (summed, lambda parts, rank: torch.stack(parts).sum(0)),
    "merged": (lambda x: merging(x[..., :-1], x[..., -1]), _merged),
    "of earlier": (of_earlier, lambda parts, rank: torch.stack([torch.zeros_like(parts[0]), *parts[:rank]]).sum(0)),
}


def _tried(
    parts: list[Tensor], rows: Callable[[Tensor], Rows], of_all: Callable[[list[Tensor], int], Tensor]
) -> dict[str, Any]:
    """Against what one process makes of the rows of all ranks, whose losses add up."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weights = [normal(*parts[0].shape, seed=10 + seed) for seed in range(ranks)]
    whole = [x.clone().requires_grad_() for x in parts]
    wanted = [of_all(whole, other) for other in range(ranks)]
    sum((x * w).sum() for x, w in zip(wanted, weights, strict=True)).backward()

    own = parts[rank].clone().requires_grad_()
    with sq.distributed.traffic() as forward:
        (result,) = combine_together([rows(own)], None)
    with sq.distributed.traffic() as backward:
        (result * weights[rank]).sum().backward()
    return {
        "error": far(wanted[rank], result),
        "of gradient": far(gradient(whole[rank]), gradient(own)),
        "bits": result.detach().contiguous().view(torch.int32).sum().item(),
        "calls": [forward.calls, backward.calls],
        "bytes": [forward.bytes, backward.bytes],
    }


def _mixed(parts: list[Tensor]) -> dict[str, Any]:
    """Rows of several dtypes and widths, one of them fewer than ranks, by one call."""
    rank = dist.get_rank()
    few = torch.full((1, 3), 2**40 + rank)
    with sq.distributed.traffic() as counted:
        fine, whole = combine_together([summed(parts[rank].double()), summed(few)], None)
    wanted = sum(part.double() for part in parts)
    of_few = sum(2**40 + other for other in range(len(parts)))
    return {
        "error": float((fine - wanted).abs().max()) + float((whole - of_few).abs().max()),
        "shapes": [list(fine.shape), list(whole.shape)],
        "calls": [counted.calls],
    }


SCORES = (
    ((5.0, 1.0, 3.0, 3.0), (2.0, 3.0, 4.0, 0.0), (3.0, 3.0, -1.0, 2.0), (9.0, 3.0, -2.0, -2.0)),
    ((1.0, 2.0, float("-inf"), float("-inf")), (float("-inf"),) * 4, (0.5, *(float("-inf"),) * 3), (1.0,) * 4),
)


def _chosen() -> dict[str, Any]:
    """The five best of four tokens a rank, some of equal score, in two buckets."""
    of = sq.distributed.Sequence.even(4 * dist.get_world_size())
    scores = torch.tensor([bucket[of.rank] for bucket in SCORES])[None, None]
    chosen = choose(scores, 5, of.lengths, of)
    rows = chosen.in_slots(scores.unsqueeze(-1)).nan_to_num(neginf=0.0)
    (values,) = combine_together([summed(rows)], of.group)
    return {
        "rank": chosen.rank[0, 0].tolist(),
        "own": chosen.candidate[0, 0].tolist(),
        "mine": chosen.mine[0, 0].tolist(),
        "values": values[0, 0, ..., 0].tolist(),
    }
