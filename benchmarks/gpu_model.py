"""The time of each method on GPUs that need not be here, predicted from the launches that it asks for.

    python benchmarks/gpu_model.py --out benchmarks/results/gpu-model.md

What is recorded and what is assumed is in `subquad/tools/measure/gpu_model.py`; `gpu_chips.py` beside it has the peaks.
"""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import sheet
import torch
from sheet import MISSING, table

import subquad as sq
from subquad.core.files import write
from subquad.methods.clustered_tail import OF_ITEM, by_length
from subquad.tools.measure import gpu_model as model
from subquad.tools.measure.fidelity import crossover
from subquad.tools.measure.gpu_chips import GPUS, Gpu
from subquad.tools.measure.gpu_model import GpuLoad, Recorded, captured, eager, exact, holding
from subquad.tools.report.cells import significant

PASSES = "forward", "forward+backward"
METHODS = tuple(model.methods())
# What the plan of these kernels expected of a forward pass at D=64 on an H100, and asked of clustered-tail.
EXPECTED = {
    "i-clustered": {4096: 1.3, 16384: 6, 65536: 24},
    "clustered": {4096: 1.7, 16384: 8, 65536: 33},
    "clustered-tail": {4096: 1.0, 16384: 5, 65536: 20},
}

Table = dict[str, dict[GpuLoad, Recorded]]


def main(
    lengths: tuple[int, ...] = tuple(1024 << i for i in range(7)),
    widths: tuple[int, ...] = (64, 128),
    methods: tuple[str, ...] = METHODS,
    out: Path | None = None,
) -> None:
    loads = [GpuLoad(length, width=width) for width in widths for length in lengths]
    records, missing = recorded(list(methods), loads)
    text = "\n\n".join([*ABOUT, *parts(records, missing, loads), *assumptions()]) + "\n"
    print(text)
    if out is not None:
        write(out, text)


def recorded(texts: list[str], loads: list[GpuLoad]) -> tuple[Table, dict[str, str]]:
    """The kernels and operators that each method runs at each load; and why other methods cannot be recorded."""
    records: Table = {}
    missing = {}
    for text in texts:
        try:
            records[text] = {load: model.record(sq.parse_method(text), load) for load in loads}
        except (ValueError, RuntimeError, NotImplementedError) as error:
            missing[text] = str(error).partition("\n")[0]
    return records, missing


ABOUT = [
    "# The GPU cost model",
    "No figure here was measured on a GPU.\n"
    "They are times predicted from the launches that each method asks for, recorded on the meta device: the grids, "
    "multiply-adds and bytes of our own kernels, and torch's own calls.\n"
    "`subquad bench --device cuda --gpu-sheet` measures the same table, and writes this model's prediction beside it.",
]


def parts(records: Table, missing: dict[str, str], loads: list[GpuLoad]) -> list[str]:
    lines = ["## Speed-ups over exact attention", "Captured in a CUDA graph, and in brackets launched from Python."]
    for gpu in GPUS.values():
        for passes in PASSES:
            lines += [f"### {gpu.name}, {passes}", speedups(gpu, passes, records, loads)]
    lines += ["## From which length on each method wins", crossovers(records, loads)]
    lines += ["## Against what was expected", *against_expectation(records, loads)]
    lines += ["## What holds each method", "On an H100, in a CUDA graph, forward.", held(records, loads)]
    lines += ["## Settings", settings(records, loads)]
    if missing:
        lines += ["## Not predicted", "\n".join(f"- `{name}`: {reason}" for name, reason in missing.items())]
    return lines


def widths_of(loads: list[GpuLoad]) -> list[int]:
    return list(dict.fromkeys(load.width for load in loads))


def lengths_of(loads: list[GpuLoad]) -> list[int]:
    return sorted({load.length for load in loads})


def speedups(gpu: Gpu, passes: str, records: Table, loads: list[GpuLoad]) -> str:
    """A line for each method and width; first the times of what it is compared with."""
    at = lengths_of(loads)
    rows = []
    for width in widths_of(loads):
        own = [replace(loads[0], length=length, width=width) for length in at]
        for named in gpu.exact:
            times = (1e3 * exact(gpu, load, passes, named) for load in own)
            rows.append([f"{named}, D={width}, ms", *map(significant, times)])
        for name, by_load in records.items():
            rows.append([f"{name}, D={width}", *(cell(gpu, by_load[load], load, passes) for load in own)])
    return table(["", *(f"{length:,}" for length in at)], rows)


def cell(gpu: Gpu, record: Recorded, load: GpuLoad, passes: str) -> str:
    steps, base = record.steps(passes), exact(gpu, load, passes)
    return f"{base / captured(steps, gpu):.2f}× ({base / eager(steps, gpu):.2f}×)"


def crossovers(records: Table, loads: list[GpuLoad]) -> str:
    head = ["method", *(f"{gpu}, {mode}" for gpu in GPUS for mode in ("captured", "eager"))]
    rows = []
    for name, by_load in records.items():
        for width in widths_of(loads):
            row = [f"{name}, D={width}"]
            for gpu in GPUS.values():
                own = {at.length: (exact(gpu, at, PASSES[0]), r) for at, r in by_load.items() if at.width == width}
                for time in (captured, eager):
                    faster = crossover({n: base / time(r.forward, gpu) for n, (base, r) in own.items()})
                    row.append(MISSING if faster is None else f"{faster:,.0f}")
            rows.append(row)
    longest = max(lengths_of(loads))
    about = f"Forward, against the fastest exact attention; {MISSING}: not up to {longest:,} tokens."
    return f"{about}\n\n{table(head, rows)}"


def against_expectation(records: Table, loads: list[GpuLoad]) -> list[str]:
    gpu, rows = GPUS["H100"], []
    for name, expected in EXPECTED.items():
        for load in loads:
            if name in records and load.width == 64 and load.length in expected:
                have = exact(gpu, load, PASSES[0]) / captured(records[name][load].forward, gpu)
                want = expected[load.length]
                rows.append([f"{name}, {load.length:,}", f"{want:g}×", f"{have:.2f}×", f"{have / want:.2f}"])
    text = "H100, D=64, forward, in a CUDA graph, against FlashAttention-3; expected before the kernels were written."
    return [text, table(["", "expected or asked for", "by the model", "ratio"], rows)]


def held(records: Table, loads: list[GpuLoad]) -> str:
    """Milliseconds, what the device does most of the time, and how many launches there are."""
    gpu = GPUS["H100"]
    rows = []
    for name, by_load in records.items():
        for load, record in by_load.items():
            most = ", ".join(f"`{kernel}` {share:.0%}" for kernel, share in holding(record.forward, gpu)[:3])
            ours = sum(step.programs is not None for step in record.forward)
            rows.append(
                [
                    f"{name}, D={load.width}, {load.length:,}",
                    significant(1e3 * captured(record.forward, gpu)),
                    significant(1e3 * eager(record.forward, gpu)),
                    most,
                    f"{ours} + {len(record.forward) - ours}",
                ]
            )
    return table(["", "captured, ms", "eager, ms", "most of the time", "launches, ours + torch's"], rows)


def settings(records: Table, loads: list[GpuLoad]) -> str:
    rows = []
    for name in records:
        own = {key: value for key, value in sq.parse_method(name).to_dict().items() if key not in ("name", "seed")}
        said = ", ".join(f"{key}={value}" for key, value in own.items())
        if name.startswith("clustered-tail"):
            for length in lengths_of(loads):
                clusters, topk = (
                    by_length(own[key], growth, length, None)[0]
                    for key, growth in zip(OF_ITEM._fields, OF_ITEM, strict=True)
                )
                said += f"; {length:,} tokens: {clusters} clusters, {topk} keys"
        rows.append([name, said])
    return table(["method", "settings"], rows)


def assumptions() -> list[str]:
    names = list(GPUS)
    rows = [
        ["TFLOP/s of 16-bit products", *(f"{g.peak:g}" for g in GPUS.values())],
        ["10¹² operations/s outside of them", *(f"{g.lanes:g}" for g in GPUS.values())],
        ["GB/s", *(f"{g.bandwidth:g}" for g in GPUS.values())],
        ["multiprocessors", *(str(g.multiprocessors) for g in GPUS.values())],
        ["sorts, 10⁹ keys/s (assumed)", *(f"{g.keys:g}" for g in GPUS.values())],
    ]
    reached = (
        f"Assumed of the peaks: {model.OF_PEAK:g} of the products and {model.OF_BANDWIDTH:g} of the bandwidth; a "
        f"kernel of a CUDA graph starts {1e6 * model.GAP:g} µs after the one before, and the host takes "
        f"{1e6 * model.TORCH_CALL:g} µs for a call of torch and {1e6 * model.TRITON_LAUNCH:g} µs for a launch of "
        "Triton. "
        f"Choosing the largest is taken to be {model.TOPK} times as fast as a sort.\n"
        f"The backward pass of exact attention is taken to have {model.BACKWARD} times the operations at "
        f"{model.OF_FORWARD} of the throughput.\n"
        "Bytes that kernels gather are counted as traffic of the memory also where the cache holds them."
    )
    made = (
        f"`{sheet.command()}`: 32 heads in all, bf16, torch "
        f"{torch.__version__.partition('+')[0]}, triton {version('triton')}, subquad {version('subquad')}."
    )
    return ["## Peaks and assumptions", table(["", *names], rows), reached, made]


if __name__ == "__main__":
    sheet.run(main)
