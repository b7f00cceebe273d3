"""The GPU resources of every Triton kernel, compiled for four GPUs. No GPU is needed.

    python benchmarks/gpu_resources.py --processes 2 --out benchmarks/results/gpu-resources.md

The kernels are those that the methods launch, forward and backward, recorded on the meta device. Triton keeps what it
compiled on the disk, so that a run that was interrupted goes on.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import product
from pathlib import Path

import sheet
import torch
from sheet import MISSING, table

import subquad as sq
from subquad.core.files import write
from subquad.kernels.triton.recording import Launch
from subquad.kernels.triton.resources import CHIPS, Resources, compile_for
from subquad.tools.measure import gpu_model
from subquad.tools.measure.gpu_model import GpuLoad, launches_of_passes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
METHODS = tuple(gpu_model.methods())

Kernels = dict[tuple[str, ...], tuple[Launch, list[str]]]  # by the code: a launch, and the loads that it occurs at
_launches: list[Launch] = []  # what the processes of a fork see; kernels cannot be sent


def main(
    lengths: tuple[int, ...] = (1000, 4096),
    widths: tuple[int, ...] = (64, 128),
    methods: tuple[str, ...] = METHODS,
    chips: tuple[str, ...] = tuple(CHIPS),
    processes: int = 1,
    out: Path | None = None,
) -> None:
    sheet.check_known("--chips", chips, CHIPS)
    kernels, missing = of_methods(list(methods), list(lengths), list(widths))
    resources = compiled(list(kernels), [launch for launch, _ in kernels.values()], list(chips), processes)
    text = "\n\n".join(parts(kernels, resources, missing, list(chips), list(lengths))) + "\n"
    print(text)
    if out is not None:
        write(out, text)


def of_methods(texts: list[str], lengths: list[int], widths: list[int]) -> tuple[Kernels, dict[str, str]]:
    kernels: Kernels = {}
    missing = {}
    for text in texts:
        try:
            for label, launch in launches(sq.parse_method(text), lengths, widths):
                labels = kernels.setdefault(launch.code, (launch, []))[1]
                if label not in labels:
                    labels.append(label)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            missing[text] = str(error).partition("\n")[0]
    return kernels, missing


def launches(method: sq.Method, lengths: list[int], widths: list[int]) -> Iterator[tuple[str, Launch]]:
    """Every launch of the passes, at each dtype and width."""
    for (named, dtype), width in product(DTYPES.items(), widths):
        for launch in launches_of_passes(method, [GpuLoad(length, width=width, dtype=dtype) for length in lengths]):
            yield f"{named} D={width}", launch


def compiled(
    codes: list[tuple[str, ...]], kernels: list[Launch], chips: list[str], processes: int
) -> dict[tuple[tuple[str, ...], str], Resources]:
    _launches[:] = kernels
    jobs = [(index, chip) for index in range(len(kernels)) for chip in chips]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
        return {(codes[i], chip): made for (i, chip), made in zip(jobs, pool.map(_compile, jobs), strict=True)}


def _compile(job: tuple[int, str]) -> Resources:
    index, chip = job
    return compile_for(_launches[index], CHIPS[chip])


def parts(
    kernels: Kernels,
    resources: dict[tuple[tuple[str, ...], str], Resources],
    missing: dict[str, str],
    chips: list[str],
    lengths: list[int],
) -> list[str]:
    groups: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    everywhere = {label for _, labels in kernels.values() for label in labels}
    for code, (launch, labels) in kernels.items():
        at = "all" if set(labels) == everywhere else ", ".join(labels)
        groups.setdefault((launch.name, at), []).append(code)
    rows = []
    for (name, at), codes in sorted(groups.items()):
        cells = [cell([resources[code, chip] for code in codes], chip) for chip in chips]
        rows.append([f"`{name}`", at, str(len(codes)), *cells])
    faults = [made for made in resources.values() if made.spills or made.stack]
    lines = [
        "# What the Triton kernels take of a GPU",
        f"{len(kernels)} kernels and configurations, compiled for {', '.join(chips)}; {len(faults)} of these "
        f"{len(resources)} spill registers or have a stack frame.\n"
        "A cell: registers of a thread · KiB of shared memory of a program · programs that a multiprocessor holds at a "
        "time · instructions of the tensor cores in the code; then bytes of spilled registers, where there are some.\n"
        "Where a line has several versions, which differ in constants, in what is given or in alignment, a figure is "
        "the worst.",
        table(["kernel", "at", "versions", *chips], rows),
    ]
    if missing:
        lines.append("Not recorded:\n\n" + "\n".join(f"- `{name}`: {reason}" for name, reason in missing.items()))
    tokens = " and ".join(f"{length:,}" for length in lengths)
    made_by = ", ".join(f"{name} {version(name)}" for name in ("triton", "subquad"))
    lines.append(
        f"`{sheet.command()}`: {tokens} tokens, 32 heads, "
        f"forward and backward, torch {torch.__version__.partition('+')[0]}, {made_by}."
    )
    return lines


def cell(versions: list[Resources], chip: str) -> str:
    worst = (
        max(r.registers for r in versions),
        f"{max(r.shared for r in versions) / 1024:.3g}",
        min(r.resident(CHIPS[chip]) for r in versions),
        min(r.products for r in versions) or MISSING,
    )
    spilled = max(r.spills + r.stack for r in versions)
    return " · ".join(map(str, worst)) + (f" · **{spilled} B spilled**" if spilled else "")


if __name__ == "__main__":
    sheet.run(main)
