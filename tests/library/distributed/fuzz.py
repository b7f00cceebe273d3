"""Random calls over a few gloo ranks, forward and backward, compared with one process.

    python -m tests.library.distributed.fuzz --cases 1000 --ranks 3 --seed 0

Every case draws a method, shapes (sizes of 1 often), a split, a mask, and options. What each rank has must equal its
part of what one process has. Then item 0 of the batch gets NaN, infinity, huge or other numbers, and everything about
the other items must stay as it was, up to rounding. Each case follows from the seed and its number alone, and `--first`
starts at a number. The ranks are started once for all cases.

Methods choose: which keys, which clusters. Where a rounding error decides a choice, one process differs from itself
as much after a change of its inputs in the last bits, and such a difference is not counted.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import subquad as sq
from subquad.distributed.strategies import summary_of
from subquad.testing.oracle import normal
from tests.library.distributed.cases import CASES
from tests.library.distributed.combined import everything_by_shares
from tests.library.distributed.launch import ROOT
from tests.library.distributed.ranks import Case, gradient
from tests.library.test_contract import TestEveryMethod

OURS = (case.method for case in CASES if isinstance(case, Case) and case.method.partition(":")[0] in sq.METHODS)
TEXTS = sorted({*map(str, TestEveryMethod.methods), *OURS})
METHODS: dict[str, list[str]] = {}  # the texts of each kind
for text in TEXTS:
    METHODS.setdefault(sq.parse_method(text).name, []).append(text)
SENDS_SUMMARIES = [name for name, texts in METHODS.items() if any(map(summary_of, map(sq.parse_method, texts)))]
HEADS = [(1, 1), (1, 1), (1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 3), (5, 1)]
BY_DTYPE = {torch.float32: 3e-5, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 5e-3}
LAST_BITS = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 8e-3, torch.float16: 1e-3}
POISONS = (math.nan, math.inf, 1e30, None)  # None: other numbers


@dataclass(frozen=True)
class Call:
    """One random call on the whole sequence, and how it is split."""

    method: sq.Method
    mode: str
    lengths: tuple[int, ...]
    keys: tuple[int, ...] | None
    inputs: dict[str, Tensor]  # query, key, value, and perhaps bias and hidden
    loss: Tensor
    mask: sq.Mask
    options: dict[str, Any]
    keep: Any
    by_shares: bool
    parameters: int  # the seed of what a method has learned

    def __str__(self) -> str:
        shapes = {name: (*x.shape,) for name, x in self.inputs.items()}
        dtype, keep = self.loss.dtype, "bools" if isinstance(self.keep, Tensor) else self.keep
        return (
            f"{self.method} {self.mode} lengths={self.lengths} keys={self.keys} {shapes} {dtype} {self.mask} "
            f"keep={keep} {self.options}{' by shares' * self.by_shares}"
        )


# ---------------------------------------------------------------------- what is drawn


def split(rng: Random, ranks: int, most: int) -> tuple[int, ...]:
    """A random number of tokens for each rank: one each, equal numbers, any numbers, or any with one rank of one."""
    kind = rng.randrange(5)
    if kind == 0:
        return (1,) * ranks
    lengths = [rng.randint(1, most // ranks) for _ in range(ranks)]
    if kind == 1:
        lengths = [max(lengths)] * ranks
    elif kind == 2:
        lengths[rng.randrange(ranks)] = 1
    return tuple(lengths)


def drawn_mask(rng: Random, method: sq.Method, sizes: tuple[int, int, int, int], own_keys: bool) -> sq.Mask:
    """A mask of the parts that the method takes."""
    B, H, N, M = sizes
    bools = partial(_bools, rng)
    parts: list[sq.Mask] = []
    if rng.random() < 0.4 and own_keys:
        parts.append(sq.Mask.padding(keys=bools(B, M), queries=bools(B, N)))
    elif rng.random() < 0.4 and own_keys:
        parts.append(sq.Mask.padding(keys=torch.tensor([rng.randint(0, M) for _ in range(B)])))
    elif rng.random() < 0.3:
        parts.append(sq.Mask.padding(bools(B, N)))
    elif rng.random() < 0.3:
        parts.append(sq.Mask.padding(torch.tensor([rng.randint(0, N) for _ in range(B)])))
    if rng.random() < 0.35:
        offset: Any = rng.randint(0, M) if own_keys else rng.choice((None, None, 0, 3))
        if own_keys and rng.random() < 0.3:
            offset = torch.tensor([rng.randint(0, M) for _ in range(rng.choice((1, B)))])
        parts.append(sq.Mask.causal(offset=offset))
    if rng.random() < 0.2 and (not own_keys or (parts[-1:] and parts[-1].is_causal)):
        parts.append(sq.Mask.window(rng.randint(0, 9)))
    if rng.random() < 0.2 and not own_keys:
        ids = torch.randint(-1, 4, (B, N), generator=_generator(rng))
        parts.append(sq.Mask.segments(ids.sort(1).values if rng.random() < 0.7 else ids))
    if rng.random() < 0.15:
        parts.append(sq.Mask.dense(bools(rng.choice((1, B)), rng.choice((1, H)), N, M)))
    mask = sq.Mask()
    for part in parts:
        if method.refuses(mask & part) is None:
            mask = mask & part
    return mask


def _generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(60))


def _bools(rng: Random, *shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator(rng)) < rng.choice((0.1, 0.5, 0.9))


def drawn_call(rng: Random, ranks: int, only: list[str]) -> Call:
    """A call of a method, of those with these names if there are some; every second one can send summaries."""
    names = only or (SENDS_SUMMARIES if rng.random() < 0.5 else list(METHODS))
    method = sq.parse_method(rng.choice(METHODS[rng.choice(names)]))
    traits, (H, G) = method.traits, rng.choice(HEADS)
    if "mixed-heads" in str(method):
        H = G = rng.choice((4, 6))
    B, D, E = rng.choice((1, 2, 2, 3)), rng.choice((1, 4, 8, 8, 11)), rng.choice((1, 4, 8, 9))
    E = D if traits.learned else E
    lengths = split(rng, ranks, 60)
    keys = split(rng, ranks, 60) if traits.cross and rng.random() < 0.25 else None
    N = sum(lengths)
    M = N if keys is None else sum(keys)
    dtype = rng.choice((torch.float32,) * 5 + (torch.float64,) * 2 + (torch.bfloat16, torch.float16))
    scales = [rng.choice((0.1, 1.0, 1.0, 1.0, 5.0, 30.0)) for _ in range(2)]
    seeds = [rng.getrandbits(40) for _ in range(5)]
    inputs = {
        "query": scales[0] * normal(B, H, N, D, seed=seeds[0]),
        "key": scales[1] * normal(B, G, M, D, seed=seeds[1]),
        "value": normal(B, G, M, E, seed=seeds[2]),
    }
    if traits.bias and rng.random() < 0.4:
        inputs["bias"] = normal(rng.choice((1, B)), rng.choice((1, H)), N, M, seed=seeds[3])
    if traits.needs_hidden:
        inputs["hidden"] = normal(B, N, H * D, seed=seeds[3])
    mask = drawn_mask(rng, method, (B, H, N, M), keys is not None)
    keep: Any = None
    if traits.lse and keys is None and rng.random() < 0.25:
        keep = _bools(rng, B, N) if rng.random() < 0.5 else [rng.randint(-N, N - 1) for _ in range(rng.randint(1, 3))]
    options: dict[str, Any] = {"seed": rng.randrange(9)}
    if traits.lse and rng.random() < 0.4:
        options["return_lse"] = True
    if rng.random() < 0.2:
        options["scale"] = rng.choice((0.1, 0.7))
    return Call(
        method=method,
        mode=rng.choice(("auto", "auto", "summary", "summary", "heads", "ring")),
        lengths=lengths,
        keys=keys,
        inputs={name: x.to(dtype) for name, x in inputs.items()},
        loss=normal(B, H, N, E, seed=seeds[4]).to(dtype),
        mask=mask,
        options=options,
        keep=keep,
        by_shares=rng.random() < 0.3,
        parameters=rng.getrandbits(40),
    )


# ---------------------------------------------------------------------- what is run


def attend(call: Call) -> tuple[Callable[..., Any], list[torch.nn.Parameter]]:
    """Return the function to call and its learned parameters, which are the same on all ranks."""
    query, key = call.inputs["query"], call.inputs["key"]
    if not call.method.traits.learned:
        return partial(sq.attention, method=call.method, enable_gqa=True), []
    longest = max(query.shape[2], key.shape[2]) + 3
    bound = call.method.bind(
        heads=query.shape[1], kv_heads=key.shape[1], head_dim=query.shape[3], max_length=longest
    ).eval()
    with torch.no_grad():
        for number, parameter in enumerate(bound.parameters()):
            parameter.add_(0.2 * normal(*parameter.shape, seed=call.parameters + number))
    return bound, list(bound.parameters())


def results(call: Call, of: sq.distributed.Sequence | None) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Outputs and gradients by name, and the gradients of what was learned: of this rank's part, or of all."""
    run, learned = attend(call)
    keys = None if of is None else sq.distributed.Sequence(of.key_lengths)

    def part(x: Tensor, axis: int, sequence: sq.distributed.Sequence | None = of) -> Tensor:
        return x if sequence is None else sequence.shard(x, dim=axis)

    mask = replace(
        call.mask,
        both=tuple(x if x.ndim == 1 else part(x, 1) for x in call.mask.both),
        queries=tuple(x if x.ndim == 1 else part(x, 1) for x in call.mask.queries),
        keys=tuple(x if x.ndim == 1 else part(x, 1, keys) for x in call.mask.keys),
        ids=tuple(part(x, 1) for x in call.mask.ids),
        allowed=tuple(part(x, 2) for x in call.mask.allowed),
    )
    own = {
        name: part(x, 1 if name == "hidden" else 2, keys if name in ("key", "value") else of).clone().requires_grad_()
        for name, x in call.inputs.items()
    }
    given = {name: x for name, x in own.items() if name in ("bias", "hidden")} | call.options
    if call.keep is not None:
        given["keep"] = part(call.keep, 1) if isinstance(call.keep, Tensor) else call.keep
    outputs = run(own["query"], own["key"], own["value"], mask=mask, parallel=of, **given)
    out, lse = outputs if isinstance(outputs, tuple) else (outputs, None)
    loss = (out * part(call.loss, 2)).sum()
    loss = loss if lse is None else loss + lse.where(lse.isfinite(), 0.0).sum()
    loss.backward()
    have = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    have |= {f"gradient of {name}": gradient(x) for name, x in own.items()}
    return have, [gradient(x) for x in learned]


def part_of_rank(call: Call, of: sq.distributed.Sequence, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of the results of one process."""
    keys = sq.distributed.Sequence(of.key_lengths)
    side = {"gradient of key": keys, "gradient of value": keys}
    return {n: side.get(n, of).shard(x, dim=1 if n == "gradient of hidden" else 2) for n, x in whole.items()}


def apart(want: Tensor, have: Tensor, size: float = 1.0) -> float:
    """The largest difference, of numbers beyond `size` the relative one; infinite if other numbers are finite."""
    want, have = want.double(), have.double()
    if want.shape != have.shape:
        return math.inf
    same = (want == have) | (want.isnan() & have.isnan())
    if bool((~same & ~(want.isfinite() & have.isfinite())).any()):
        return math.inf
    return float((want - have).masked_fill(same, 0.0).abs().amax()) / size_of(want, size) if want.numel() else 0.0


def size_of(x: Tensor, least: float = 1.0) -> float:
    """The largest finite number, and at least `least`."""
    return max(least, float(x.double().nan_to_num(0.0, 0.0, 0.0).abs().amax())) if x.numel() else least


def errors(names: list[str], want: list[Tensor], have: list[Tensor]) -> list[float]:
    """The distance of each result from what it should be, of gradients relative to the largest of all of them.

    The gradient of a parameter is a sum over all tokens, in which large terms may cancel.
    """
    size = max(size_of(x) for name, x in zip(names, want, strict=True) if name.startswith("gradient"))
    sizes = [size if name.startswith("gradient") else 1.0 for name in names]
    return [apart(a, b, size) for a, b, size in zip(want, have, sizes, strict=True)]


def nudged(call: Call, seed: int) -> Call:
    """The call with inputs that differ in their last bits."""
    step = LAST_BITS[call.loss.dtype]
    return replace(
        call,
        inputs={
            name: x * (1 + step * normal(*x.shape, seed=seed + number).clamp(-2, 2)).to(x.dtype)
            for number, (name, x) in enumerate(call.inputs.items())
        },
    )


def unstable(call: Call, names: list[str], want: list[Tensor], take: Callable[..., list[Tensor]]) -> float:
    """The largest distance of one process from itself, of several changes in the last bits of its inputs."""
    changes = (take(*results(nudged(call, 1000 * change), None)) for change in range(1, 9))
    return max(max(errors(names, want, changed)) for changed in changes)


def differences(
    call: Call, of: sq.distributed.Sequence, have: dict[str, Tensor], learned: list[Tensor]
) -> tuple[list[str], bool]:
    """Return how this rank's results differ from one process's, and whether rounding decided a choice."""

    def own_part(whole: dict[str, Tensor], of_learned: list[Tensor]) -> list[Tensor]:
        return [*part_of_rank(call, of, whole).values(), *of_learned]

    names = [*have, *(f"gradient of parameter {number}" for number in range(len(learned)))]
    try:
        want = own_part(*results(call, None))
    except ValueError as refusal:
        return [f"one process refuses the call: {refusal}"], False
    found = dict(zip(names, errors(names, want, [*have.values(), *learned]), strict=True))
    tolerance = BY_DTYPE[call.loss.dtype]
    of_learned = max((BY_DTYPE[x.dtype] for x in learned), default=tolerance)  # fp32 beside inputs of fp64
    limits = [tolerance] * len(have) + [max(tolerance, of_learned)] * len(learned)
    wrong = {name: error for (name, error), limit in zip(found.items(), limits, strict=True) if error > limit}
    allowed = 10 * unstable(call, names, want, own_part) if wrong else 0.0
    lines = [f"{name} is off by {error:.2g}" for name, error in wrong.items() if error > allowed]
    return lines, bool(wrong) and not lines


def leaks(call: Call, of: sq.distributed.Sequence, clean: dict[str, Tensor], rng: Random) -> list[str]:
    """Return the results of other items that change when item 0 changes."""
    poison, name = rng.choice(POISONS), rng.choice([n for n, x in call.inputs.items() if len(x) > 1])
    everything, seed = rng.random() < 0.5, rng.getrandbits(40)
    x = call.inputs[name].clone()
    other = normal(*x.shape[1:], seed=seed).to(x.dtype)
    if poison is not None:
        other.fill_(poison if not math.isfinite(poison) else min(poison, torch.finfo(x.dtype).max))
    where = torch.rand(x.shape[1:], generator=_generator(rng)) < (1.0 if everything else 0.05)
    x[0] = torch.where(where, other, x[0])
    changed, _ = results(replace(call, inputs={**call.inputs, name: x}), of)
    moved = {label: apart(x[1:], changed[label][1:]) for label, x in clean.items() if len(x) == len(call.loss)}
    rounding = 10 * LAST_BITS[call.loss.dtype]
    return [
        f"{label} of other items moves by {by:.2g} when the {name} of item 0 has {poison or 'other numbers'}"
        for label, by in moved.items()
        if by > rounding
    ]


def tried(call: Call, rng: Random, counts: Counter[str], *, verbose: bool) -> tuple[str, list[str]]:
    """Return this rank's outcome ("compared", "alone" if there is no other item, or a refusal) and the differences."""
    of = sq.distributed.Sequence(call.lengths, keys=call.keys, mode=call.mode)
    with everything_by_shares() if call.by_shares else nullcontext():
        try:
            have, learned = results(call, of)
        except ValueError as refusal:
            if verbose:
                print(f"rank {of.rank}:", refusal, flush=True)
            return str(refusal), []
        for x in learned:
            dist.all_reduce(x)
        found, by_rounding = differences(call, of, have, learned)
        counts["decided by rounding"] += by_rounding
        if len(call.loss) == 1:
            return "alone", found
        return "compared", found + leaks(call, of, have, rng)


def refused_alone(call: Call) -> str | None:
    """The reason why one process refuses the call; None if it does not."""
    try:
        results(call, None)
    except ValueError as refusal:
        return str(refusal)
    return None


def run_ranks(cases: int, first: int, seed: int, only: list[str], *, verbose: bool) -> None:
    """All cases on this rank; the first rank prints what was found."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    rank, ranks, began = dist.get_rank(), dist.get_world_size(), time.monotonic()
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    findings = 0
    for number in range(first, first + cases):
        rng = Random(f"{seed}/{number}")
        call = drawn_call(rng, ranks, only)
        if verbose and rank == 0:
            print(number, call, flush=True)
        became, found = tried(call, rng, counts, verbose=verbose)
        if became.startswith("mode="):
            refusals[became[:55]] += 1
            became, found = tried(replace(call, mode="auto"), rng, counts, verbose=verbose)
        if became not in ("compared", "alone"):
            if "use " not in became and refused_alone(call) is None:
                found.append(f"refused without a remedy: {became}")
            refusals[became[:55]] += 1
        counts[became if became in ("compared", "alone") else "refused"] += 1
        said: list[Any] = [None] * ranks
        dist.all_gather_object(said, (became, found))
        if len({each for each, _ in said}) > 1:
            found = [*found, f"ranks differ: {[each for each, _ in said]}"]
            said[rank] = (became, found)
        lines = [f"  rank {other}: {line}" for other, (_, lines) in enumerate(said) for line in lines]
        findings += bool(lines)
        if lines and rank == 0:
            print(f"case {number} of seed {seed}: {call}", *lines, sep="\n", flush=True)
    if rank == 0:
        if verbose:
            print(json.dumps(dict(refusals.most_common()), indent=1))
        seconds = round(time.monotonic() - began)
        print(json.dumps({"cases": cases, **counts, "findings": findings, "seconds": seconds}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--method", action="append", default=[], choices=METHODS, help="of this name alone")
    parser.add_argument("--verbose", action="store_true", help="name every case before it runs, and what was refused")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_ranks(arguments.cases, arguments.first, arguments.seed, arguments.method, verbose=arguments.verbose)
        return
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    words = [*launcher, "-m", "tests.library.distributed.fuzz", *sys.argv[1:]]
    line = ""
    with subprocess.Popen(
        words, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    ) as ranks:
        assert ranks.stdout is not None
        for line in ranks.stdout:
            print(line, end="", flush=True)
    raise SystemExit(1 if ranks.returncode or json.loads(line)["findings"] else 0)


if __name__ == "__main__":
    main()
