"""What the rank that sends most sends in a forward and a backward pass, by method and by length.

    torchrun --nproc-per-node 4 benchmarks/parallel_bytes.py [--lengths 1024 8192 65536] [--methods …] [--out FILE.md]

Bytes are counted where tensors are handed to `torch.distributed` (`sq.parallel.traffic`).
"""

from typing import NamedTuple

import sheet
import torch
import torch.distributed as dist

import subquad as sq

HEADS, WIDTH = 4, 64


class Row(NamedTuple):
    """A method, how its sequence is split, and whether under a causal mask."""

    method: str
    mode: str
    causal: bool = False

    @property
    def label(self) -> str:
        """The row as the table shows it."""
        return f"{self.method}{', causal' if self.causal else ''}"


def rows(methods: list[str]) -> list[Row]:
    """Each method that has a summary, with a causal mask too where it takes one; `full` by heads and in a ring."""
    known = [sq.parse_method(text) for text in methods]
    summaries = [method for method in known if method.split_by() is not None]
    found = [Row(str(method), "summary") for method in summaries]
    found += [Row(str(method), "summary", True) for method in summaries if method.traits.causal == "strict"]
    exact = [Row("full", "heads"), Row("full", "ring"), Row("full", "ring", True)] if "full" in methods else []
    return [*found, *exact]


def sent(row: Row, tokens: int) -> tuple[int, int]:
    """Bytes and exchanges of the rank that sends most, in fp32."""
    of = sq.parallel.Sequence.even(tokens, mode=row.mode)
    attend = sq.parse_method(row.method).bind(heads=HEADS, head_dim=WIDTH, max_length=tokens)
    drawn = torch.Generator().manual_seed(of.rank)
    shape = 1, HEADS, of.lengths[of.rank], WIDTH
    inputs = [torch.randn(shape, generator=drawn).requires_grad_() for _ in range(3)]
    mask = sq.Mask.causal() if row.causal else None
    with sq.parallel.traffic() as counted:
        attend(*inputs, parallel=of, mask=mask).sum().backward()
    every: list[tuple[int, int]] = [(0, 0)] * of.ranks
    dist.all_gather_object(every, (counted.bytes, counted.calls))
    return max(every)


def main() -> None:
    parser = sheet.arguments(__doc__, (1024, 8192, 65536), methods=tuple(sq.list_methods()))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dist.init_process_group("gloo")
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    cells = []
    for row in rows(given.methods):
        found = [sent(row, tokens) for tokens in given.lengths]
        cells.append([row.label, row.mode, *(f"{bytes / 2**20:,.2f}" for bytes, _ in found), str(found[-1][1])])
        if first:
            print(*cells[-1], sep="\t", flush=True)
    head = ["method", "mode", *(f"MiB at {tokens:,}" for tokens in given.lengths), "exchanges"]
    about = (
        f"What one of {ranks} ranks, the one that sends most, sends in a forward and a backward pass: {HEADS} heads of "
        f"{WIDTH}, fp32, "
        "methods with their default settings. A summary does not grow with the length; heads and keys do."
    )
    if first:
        sheet.publish("Bytes per rank", [about, sheet.table(head, cells)], given.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
