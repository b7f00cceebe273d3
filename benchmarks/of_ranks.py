"""The work of the ranks of `parallel.py`: times or peak memory of one method, as one line of JSON of rank 0.

torchrun --standalone --nproc-per-node 2 benchmarks/of_ranks.py times performer 131072 --rounds 5
"""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import sheet
import torch
import torch.distributed as dist

import subquad as sq
from subquad.tools.measure.resident import peak_extra

HEADS, WIDTH = 6, 64


def call_of(method: str, tokens: int, sequence: sq.distributed.Sequence | None, *, learn: bool) -> Callable[[], Any]:
    """Attention of standard normal vectors, of all tokens or of this rank's, with or without its backward pass."""
    rows = tokens if sequence is None else sequence.lengths[sequence.rank]
    q, k, v = (torch.randn(1, HEADS, rows, WIDTH, requires_grad=learn) for _ in range(3))

    def run() -> Any:
        out = sq.attention(q, k, v, method=method, parallel=sequence)
        if learn:
            out.sum().backward()
            q.grad = k.grad = v.grad = None
        return out

    return run


def seconds(run: Callable[[], Any]) -> float:
    """The time that a call takes, from the moment that all ranks begin until all are done."""
    dist.barrier()
    start = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - start


def times(method: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Median times of rank 0 alone and of all ranks, in turns, so that both meet the same noise; and what is sent."""
    sequence, result = sq.distributed.Sequence.even(tokens), {}
    for name, learn in (("forward", False), ("both", True)):
        alone = call_of(method, tokens, None, learn=learn) if sequence.rank == 0 else lambda: None
        together = call_of(method, tokens, sequence, learn=learn)
        each = [(seconds(alone), seconds(together)) for _ in range(rounds + 1)][1:]
        result[name] = [median(times) for times in zip(*each, strict=True)]
    with sq.distributed.traffic() as sent:
        together()
    return result | {"bytes": sent.bytes, "calls": sent.calls}


def memory(method: str, tokens: int) -> dict[str, Any]:
    """The largest peak of a rank over a forward pass, its inputs included; of a rank alone without `parallel`."""
    sequence = sq.distributed.Sequence.even(tokens) if dist.get_world_size() > 1 else None
    call_of(method, 64, None, learn=False)()  # what the first call loads
    peak = peak_extra(lambda: call_of(method, tokens, sequence, learn=False)()).bytes
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, peak)
    return {"peak": None if None in peaks else max(peaks)}


def main(what: str, method: str, tokens: int, rounds: int = 5, threads: int = 1) -> None:
    sheet.check_known("what", (what,), ("times", "memory"))
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    work = method, tokens
    result = times(*work, rounds) if what == "times" else memory(*work)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sheet.run(main)
