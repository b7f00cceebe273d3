"""A program that measures how far each rank's part is from what one process computes.

torchrun --standalone --nproc-per-node 3 -m tests.library.distributed.ranks FOLDER [long]
"""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import subquad as sq
from subquad.distributed.collectives import MANY, add
from subquad.testing.oracle import normal

TOKENS = 53
UNEVEN = (5, 1, 30)


@dataclass(frozen=True)
class Case:
    method: str
    mode: str = "auto"
    mask: str = "none"
    heads: int = 6
    kv_heads: int = 6
    items: int = 2
    lengths: tuple[int, ...] | None = None  # None: an even split
    keys: int | None = None
    dtype: torch.dtype = torch.float32
    lse: bool = False

    @property
    def name(self) -> str:
        """The settings that are not the defaults, in one word."""
        own = [
            ("items=" * (field == "items") + str(value)).replace("torch.", "")
            for field, value in vars(self).items()
            if value != getattr(Case, field, None)
        ]
        return "-".join(own).replace(" ", "")

    def made(self) -> sq.Method:
        """The method that is called."""
        return sq.parse_method(self.method)

    def error(self) -> float:
        """The largest difference of this rank's output and gradients from those of one process."""
        return error_of(self)


@dataclass(frozen=True)
class Sent:
    """A case that counts the exchanges of a forward and a backward pass, whose size grows with the length or not."""

    method: str
    mode: str
    calls: int
    causal: bool = False
    by_shares: bool = False

    @property
    def name(self) -> str:
        return f"{self.method} {self.mode}{' causal' * self.causal}{' by shares' * self.by_shares}"


def masks(name: str, B: int) -> tuple[Callable[[], sq.Mask], Callable[[sq.distributed.Sequence], sq.Mask]]:
    """A mask of the whole sequence, and this rank's part of it."""
    valid = torch.arange(TOKENS) < torch.tensor([TOKENS, 20])[:B, None]
    left = valid.flip(1)
    ids = (torch.arange(TOKENS) // 17).expand(B, -1).contiguous()
    whole = {
        "none": lambda: sq.Mask(),
        "causal": lambda: sq.Mask.causal(),
        "lengths": lambda: sq.Mask.padding(torch.tensor([TOKENS, 20])[:B]),
        "padded": lambda: sq.Mask.padding(valid),
        "causal left": lambda: sq.Mask.causal() & sq.Mask.padding(left),
        "window": lambda: sq.Mask.window(5),
        "causal window": lambda: sq.Mask.causal() & sq.Mask.window(5),
        "short": lambda: sq.Mask.padding(torch.arange(TOKENS) < torch.tensor([9, 2])[:B, None]),
        "left": lambda: sq.Mask.padding(left),
        "segments": lambda: sq.Mask.segments(ids),
        "causal segments": lambda: sq.Mask.causal() & sq.Mask.segments(ids) & sq.Mask.padding(left),
        "mixed segments": lambda: sq.Mask.segments(ids % 2),
    }[name]

    def part(of: sq.distributed.Sequence) -> sq.Mask:
        own = {
            field: tuple(x if x.ndim == 1 else of.shard(x) for x in getattr(whole(), field))
            for field in ("both", "ids")
        }
        return replace(whole(), **own)

    return whole, part


def error_of(case: Case, more: Callable[[Callable[..., Any]], dict[str, Any]] = lambda part: {}) -> float:
    """The largest difference of this rank's output and gradients from those of one process.

    `more` gives further arguments of the call; what it applies its own argument to is this rank's part of a tensor.
    """
    ranks = dist.get_world_size()
    if case.lengths is None:
        of = sq.distributed.Sequence.even(TOKENS, keys=case.keys, mode=case.mode)
    else:
        of = sq.distributed.Sequence(shares(case.lengths, ranks), mode=case.mode)
    B = case.items
    q = normal(B, case.heads, TOKENS, 8).to(case.dtype)
    k, v = (normal(B, case.kv_heads, case.keys or TOKENS, 8, seed=seed).to(case.dtype) for seed in (1, 2))
    g = normal(B, case.heads, TOKENS, 8, seed=3).to(case.dtype)
    whole, part = masks(case.mask, B)
    how = {"return_lse": case.lse, "seed": 3}
    attend, learned = runner(case)

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    want = attend(*inputs, mask=whole(), **how, **more(lambda x: x))
    loss(want, g).backward()
    of_learned = [gradient(parameter).clone() for parameter in learned]
    for parameter in learned:
        parameter.grad = None

    keys = of if case.keys is None else sq.distributed.Sequence(of.key_lengths)
    own = [s.shard(x, dim=2).clone().requires_grad_() for s, x in ((of, q), (keys, k), (keys, v))]
    have = attend(*own, mask=part(of), parallel=of, **how, **more(of.shard))
    loss(have, of.shard(g, dim=2)).backward()

    outs = (want, have) if case.lse else ((want,), (have,))
    pairs = [(of.shard(w, dim=2), h) for w, h in zip(*outs, strict=True)]
    pairs += [(s.shard(gradient(w), dim=2), gradient(h)) for s, w, h in zip((of, keys, keys), inputs, own, strict=True)]
    for parameter, w in zip(learned, of_learned, strict=True):  # each rank has its own tokens' part of a gradient
        own_part = gradient(parameter)
        dist.all_reduce(own_part)
        pairs.append((w, own_part))
    return max((far(w, h) for w, h in pairs), default=0.0)


def runner(case: Case) -> tuple[Callable[..., Any], list[torch.nn.Parameter]]:
    """Return the function to call and its learned parameters, which are the same on all ranks."""
    method = case.made()
    if not method.traits.learned:
        return partial(sq.attention, method=method, enable_gqa=True), []
    bound = method.bind(heads=case.heads, kv_heads=case.kv_heads, head_dim=8, max_length=TOKENS + 3)
    with torch.no_grad():
        for number, parameter in enumerate(bound.parameters()):
            parameter.add_(0.2 * normal(*parameter.shape, seed=10 + number))
    return bound.eval(), list(bound.parameters())  # in training there would be an auxiliary loss


def gradient(x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of an input, or zeros if the input has no part in the output."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def shares(lengths: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Lengths for so many ranks: the last one takes what is left."""
    own = lengths[: ranks - 1] + (1,) * (ranks - 1 - len(lengths))
    return (*own, TOKENS - sum(own))


def loss(given: Any, g: torch.Tensor) -> torch.Tensor:
    """A scalar that depends on every output, and on every log-sum-exp that is finite."""
    out, lse = given if isinstance(given, tuple) else (given, None)
    total = (out * g).sum()
    return total if lse is None else total + lse.where(~lse.isneginf(), 0.0).sum()


def far(want: torch.Tensor, have: torch.Tensor) -> float:
    """The largest difference, of numbers beyond 1 the relative one; equal infinities are none."""
    want, have = (x.detach().float().nan_to_num() for x in (want, have))
    return float((want - have).abs().max() / want.abs().max().clamp(min=1.0))


def sent(method: str, mode: str, tokens: int, causal: bool = False) -> tuple[int, int]:
    """Bytes and collective calls of this rank for a forward and a backward pass."""
    of = sq.distributed.Sequence.even(tokens, mode=mode)
    parts = [of.shard(normal(1, 4, tokens, 8, seed=seed), dim=2).clone().requires_grad_() for seed in range(3)]
    attend = sq.parse_method(method).bind(heads=4, head_dim=8, max_length=tokens).eval()
    mask = sq.Mask.causal() if causal else None
    attend(*parts, parallel=of, mask=mask)  # the ranks agree
    with sq.distributed.traffic() as counted:
        attend(*parts, parallel=of, mask=mask).sum().backward()
    return counted.bytes, counted.calls


def large_sum() -> dict[str, Any]:
    """A sum of so large a tensor that each rank adds up a share of it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [normal(MANY // 4 + 5, seed=seed) for seed in range(ranks)]
    gradients = [normal(MANY // 4 + 5, seed=10 + seed) for seed in range(ranks)]
    own = parts[rank].clone().requires_grad_()
    with sq.distributed.traffic() as counted:
        total = add(own, None)
        (total * gradients[rank]).sum().backward()
    return {
        "error": far(sum(parts), total),
        "of gradient": far(sum(gradients), gradient(own)),
        "bits": total.detach().view(torch.int32).sum().item(),
        "calls": counted.calls,
        "share of bytes": counted.bytes / (own.numel() * 4 * 2 * 2 * (ranks - 1) / ranks),
    }


def main(folder: Path, long: bool) -> None:
    from tests.library.distributed.cases import CASES, LONG, REFUSED, SENT
    from tests.library.distributed.combined import combined, everything_by_shares
    from tests.library.distributed.disagreeing import disagreements

    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    found: dict[str, Any] = {}
    for case in LONG if long else (*CASES, *REFUSED):
        try:
            found[case.name] = case.error()
        except (ValueError, TypeError) as error:
            found[case.name] = str(error)
    for case in () if long else SENT:
        with everything_by_shares() if case.by_shares else nullcontext():
            found[case.name] = [sent(case.method, case.mode, tokens, case.causal) for tokens in (96, 960)]
    found["large sum"] = large_sum()
    found["combined"] = combined()
    found["disagreeing"] = disagreements()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), long="long" in sys.argv[2:])
