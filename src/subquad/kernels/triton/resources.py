"""The resources of a compiled GPU kernel: registers, shared memory, spills. No GPU is needed to compile one."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from subquad.kernels.triton.recording import Launch


@dataclass(frozen=True)
class Chip:
    """A GPU architecture, with what one of its multiprocessors has."""

    target: GPUTarget
    registers: int  # of 32 bits
    shared: int  # bytes, for all programs together
    shared_of_program: int  # bytes, for one
    threads: int
    programs: int
    products: tuple[str, ...]  # instructions of the tensor cores

    @property
    def is_nvidia(self) -> bool:
        """True if ptxas assembles for this architecture."""
        return bool(self.target.backend == "cuda")


CHIPS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), 65536, 164 << 10, 163 << 10, 2048, 32, ("mma.sync",)),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), 65536, 228 << 10, 227 << 10, 2048, 32, ("wgmma.mma_async", "mma.sync")),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), 65536, 228 << 10, 227 << 10, 2048, 32, ("tcgen05.mma", "mma.sync")),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 131072, 64 << 10, 64 << 10, 2048, 32, ("v_mfma",)),
}


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel.

    Attributes:
        registers: registers per thread.
        spills: bytes of registers that did not fit and go through memory.
        stack: bytes of a thread's stack frame.
        shared: bytes of shared memory of a program.
        threads: threads per program.
        products: instructions of the tensor cores in its code.
        kinds: the types of the numbers that these multiply, as the instructions name them; of NVIDIA's alone.
    """

    registers: int
    spills: int
    stack: int
    shared: int
    threads: int
    products: int
    kinds: tuple[str, ...] = ()

    def resident(self, chip: Chip) -> int:
        """The number of programs that one multiprocessor runs at a time, by the occupancy rule."""
        per_program = -(-self.registers // 8) * 8 * self.threads
        limits = [chip.programs, chip.threads // self.threads, chip.registers // max(per_program, 1)]
        return min([*limits, chip.shared // self.shared] if self.shared else limits)


_made: dict[tuple[str, ...], Resources] = {}


def compile_for(launch: Launch, chip: Chip) -> Resources:
    """Compile the kernel of a launch, as it would be specialised, for a GPU that need not be here.

    The same code is compiled once in a process, whichever methods launch it.
    """
    at = str(chip.target), *launch.code
    if at not in _made:
        _made[at] = _compile(launch, chip)
    return _made[at]


def _compile(launch: Launch, chip: Chip) -> Resources:
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(launch.signature) if name in launch.aligned}
    constants = {(list(launch.signature).index(name),): value for name, value in launch.constants.items()}
    source = ASTSource(launch.kernel, launch.signature, constants, attributes)
    with _active(chip.target):
        made = triton.compile(source, target=chip.target, options=dict(launch.options))
    threads = launch.options["num_warps"] * chip.target.warp_size
    return _assembled(made, chip, threads) if chip.is_nvidia else _of_amd(made, threads)


@contextmanager
def _active(target: GPUTarget) -> Iterator[None]:
    """Let kernels that ask for the target, while they are compiled, find this one."""
    before = driver._active
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    try:
        yield
    finally:
        driver._active = before  # `reset_active` would look for a GPU


def _assembled(made: Any, chip: Chip, threads: int) -> Resources:
    ptx = made.asm["ptx"]
    output = _output_of("cuobjdump", made.asm["cubin"], "--dump-resource-usage")
    stack, spills = _number(r"STACK:(\d+)", output), 0
    if stack:  # spills are on the stack: the assembler reports how much, and is slow
        architecture = re.search(r"\.target (sm_\w+)", ptx)
        assert architecture is not None, "ptx without a target"
        assembler = "ptxas-blackwell" if chip.target.arch >= 100 else "ptxas"
        log = _output_of(assembler, ptx.encode(), "-v", f"--gpu-name={architecture[1]}", "-o", os.devnull)
        spills = _number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log)
    return Resources(
        registers=_number(r"REG:(\d+)", output),
        spills=spills,
        stack=stack,
        shared=made.metadata.shared,
        threads=threads,
        products=sum(ptx.count(name) for name in chip.products),
        kinds=tuple(sorted(set(re.findall(r"mma[\w.:]*\.f32\.(tf32|bf16|f16)\b", ptx)))),
    )


def _output_of(tool: str, code: bytes, *options: str) -> str:
    """The output of a tool of Triton's wheel for some code."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile() as file:
        file.write(code)
        file.flush()
        done = subprocess.run([str(path), *options, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _of_amd(made: Any, threads: int) -> Resources:
    code = made.asm["amdgcn"]
    return Resources(
        registers=_number(r"\.vgpr_count:\s+(\d+)", code),
        spills=4 * _number(r"\.vgpr_spill_count:\s+(\d+)", code),
        stack=_number(r"\.private_segment_fixed_size:\s+(\d+)", code),
        shared=made.metadata.shared,
        threads=threads,
        products=code.count("v_mfma"),
    )


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern!r} in the assembler's output: {text[-500:]}"
    return int(match[1])
