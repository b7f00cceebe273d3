"""Every kernel that a call launches, compiled for GPUs: nothing spills, and products run on the tensor cores."""

import inspect
import os
from collections.abc import Callable

import torch
import triton

from subquad.core.requirements import release
from subquad.kernels.triton.recording import Launch, recording
from subquad.kernels.triton.resources import CHIPS, compile_for

IN_CI = ("sm_90",)
NAMES = tuple(CHIPS) if os.environ.get("SUBQUAD_ALL_CHIPS") else IN_CI

# Some compilers of Triton keep a few numbers of these kernels in memory, 44 and 72 bytes per thread: that is slower.
TRITON = release(triton.__version__)
SPILLED = {"round_of_codes": TRITON < (3, 7), "gradient_of_keys": TRITON[:2] == (3, 8)}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    """A tensor that has no numbers."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def distinct(launches: list[Launch]) -> list[Launch]:
    """The launches less those that would be compiled to the same code."""
    return list({x.code: x for x in launches}.values())


def assert_fits(call: Callable[[], object]) -> list[Launch]:
    """Record the launches of a call on meta tensors and compile each for the GPUs in NAMES; return them."""
    with recording() as launches:
        call()
    assert_all_fit(launches)
    return launches


def assert_all_fit(launches: list[Launch]) -> None:
    """Compile the kernels of these launches for the GPUs in NAMES."""
    assert launches, "no kernel was launched"
    for launch in distinct(launches):
        multiplies = launch.cost.products > 0 or "dot" in inspect.getsource(launch.kernel.fn)
        for name in NAMES:
            chip, found = CHIPS[name], compile_for(launch, CHIPS[name])
            what = f"{launch.name} for {name} with {launch.constants}, {launch.options}: {found}"
            assert SPILLED.get(launch.name) or found.spills == found.stack == 0, what
            assert found.shared <= chip.shared_of_program, what
            assert found.products > 0 or not multiplies, what
