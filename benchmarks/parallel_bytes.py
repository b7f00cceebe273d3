"""The bytes of the rank that sends most in a forward and a backward pass, by method and by length.

    torchrun --nproc-per-node 4 benchmarks/parallel_bytes.py [--lengths "1024 8192 65536"] [--methods …] [--out FILE.md]

Bytes are counted where tensors are handed to `torch.distributed` (`sq.distributed.traffic`). They and the numbers of
exchanges are exact, on a busy machine too.
"""

from pathlib import Path
from typing import NamedTuple

import sheet
import torch
import torch.distributed as dist

import subquad as sq
from subquad.distributed.strategies import summary_of

HEADS, WIDTH = 4, 64
METHODS = (
    "clustered:clusters=100",
    "i-clustered:clusters=100,topk=32",
    "clustered-tail:clusters=100,topk=32,cells=32",
    "lsh:buckets=16,bucket_size=64",
    "lha:buckets=16,bucket_size=64",
    "lha-tail",
    "lsh:buckets=16,bucket_size=64,tail=32",
    "linear",
    "performer",
    "rfa",
    "learned-feature-map",
    "linformer",
    "tilted-pool",
    "nystrom",
    "local",
    "longformer",
    "full",
)


class Row(NamedTuple):
    """A method, how its sequence is split, and whether under a causal mask."""

    method: str
    mode: str
    causal: bool = False

    @property
    def label(self) -> str:
        """The row as the table shows it."""
        return f"{self.method}{', causal' if self.causal else ''}"


class Sent(NamedTuple):
    """The traffic of a rank: bytes in both directions, and exchanges forward and backward."""

    bytes: int
    forward: int
    backward: int


def rows(methods: list[str]) -> list[Row]:
    """Each method that has a summary, with a causal mask too where it takes one; `full` by heads and in a ring."""
    known = [(text, sq.parse_method(text)) for text in methods]
    summaries = [(text, method) for text, method in known if summary_of(method) is not None]
    found = [Row(text, "summary") for text, _ in summaries]
    found += [Row(text, "summary", True) for text, method in summaries if method.traits.causal == "strict"]
    exact = [Row("full", "heads"), Row("full", "ring"), Row("full", "ring", True)] if "full" in methods else []
    return [*found, *exact]


def sent(row: Row, tokens: int) -> Sent:
    """The traffic of the rank that sends most, in fp32."""
    of = sq.distributed.Sequence.even(tokens, mode=row.mode)
    attend = sq.parse_method(row.method).bind(heads=HEADS, head_dim=WIDTH, max_length=tokens).eval()
    drawn = torch.Generator().manual_seed(of.rank)
    shape = 1, HEADS, of.lengths[of.rank], WIDTH
    inputs = [torch.randn(shape, generator=drawn).requires_grad_() for _ in range(3)]
    mask = sq.Mask.causal() if row.causal else None
    with sq.distributed.traffic() as forward:
        out = attend(*inputs, parallel=of, mask=mask)
    with sq.distributed.traffic() as backward:
        out.sum().backward()
    every = [Sent(0, 0, 0)] * of.ranks
    dist.all_gather_object(every, Sent(forward.bytes + backward.bytes, forward.calls, backward.calls))
    return max(every)


def main(
    lengths: tuple[int, ...] = (1024, 8192, 65536), methods: tuple[str, ...] = METHODS, out: Path | None = None
) -> None:
    dist.init_process_group("gloo")
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    cells = []
    for row in rows(methods):
        found = [sent(row, tokens) for tokens in lengths]
        last = found[-1]
        cells.append(
            [row.label, row.mode, *(f"{x.bytes / 2**20:,.2f}" for x in found), str(last.forward), str(last.backward)]
        )
        if first:
            print(*cells[-1], sep="\t", flush=True)
    head = ["method", "mode", *(f"MiB at {tokens:,}" for tokens in lengths), "exchanges forward", "backward"]
    about = (
        f"What one of {ranks} ranks, the one that sends most, sends in a forward and a backward pass: {HEADS} heads of "
        f"{WIDTH}, fp32. A summary does not grow with the length; heads and keys do."
    )
    if first:
        sheet.publish("Bytes per rank", [about, sheet.table(head, cells)], out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sheet.run(main)
