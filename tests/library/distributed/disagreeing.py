"""Calls in which the last rank does something else than the others."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import subquad as sq
from subquad.testing.oracle import normal


def call(
    part: torch.Tensor,
    of: sq.distributed.Sequence,
    *,
    method: str = "performer",
    dtype: Any = torch.float32,
    **how: Any,
) -> None:
    """One call on this rank's part."""
    part = part.to(dtype)
    sq.attention(part, part, part, method=method, parallel=of, **how)


# What the last rank does instead, and what all ranks are told: {last} is its number.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, "rank {last} has the seed 1 but rank 0 has 0"),
    "dtype": ({"dtype": torch.float64}, "rank {last} has the dtype torch.float64 but rank 0 has torch.float32"),
    "method": ({"method": "linear"}, "rank {last} has the method linear but rank 0 has performer"),
    "mask": ({"is_causal": True}, "rank {last} has the mask Mask.causal(offset=0) but rank 0 has Mask()"),
    "return_lse": ({"return_lse": True}, "rank {last} has return_lse True but rank 0 has False"),
    "scale": ({"scale": 1.0}, "rank {last} has the scale 1.0 but rank 0 has 0.5"),
}
MADE: dict[str, tuple[Callable[[], Any], str]] = {
    "mode": (lambda: sq.distributed.Sequence.even(9, mode="heads"), "rank {last} has mode heads but rank 0 has auto"),
    "lengths": (lambda: sq.distributed.Sequence([3] * (dist.get_world_size() - 1) + [5]), "rank {last} has lengths "),
}
GRADIENTS = "rank {last} has gradients False but rank 0 has True"


def disagreements() -> dict[str, str]:
    """Return the message that this rank gets in each case in which the ranks disagree."""
    last = dist.get_rank() == dist.get_world_size() - 1
    found = {}
    for name, (other, _) in OTHERS.items():
        of = sq.distributed.Sequence.even(9)
        found[name] = told(lambda of=of, other=other: call(part_of(of), of, **(other if last else {})))
    for name, (make, _) in MADE.items():
        of = make() if last else sq.distributed.Sequence.even(9)
        found[name] = told(lambda of=of: call(part_of(of), of))
    of = sq.distributed.Sequence.even(9)
    with torch.set_grad_enabled(not last):
        found["gradients"] = told(lambda: call(part_of(of).requires_grad_(not last), of))
    heads = sq.distributed.Sequence.even(9)
    found["heads"] = told(lambda: call(part_of(heads)[:, : 2 if last else 3], heads))
    first = dist.new_group([0])
    found["group"] = told(lambda: sq.distributed.Sequence.even(9, group=first))
    return found


def part_of(of: sq.distributed.Sequence) -> torch.Tensor:
    """This rank's tokens of some input."""
    return normal(1, 3, of.lengths[of.rank], 4)


def told(attempt: Callable[[], Any]) -> str:
    """The message of the error, or that there is none."""
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return "nothing"
