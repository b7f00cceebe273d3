"""Calls into the native library: which tensors it accepts, and how a kernel is run."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.native import described, library
from subquad.kernels.native.structures import DTYPES, ROWS, Structure
from subquad.kernels.transforms import transform

FLOAT32 = torch.empty(0, dtype=torch.float32, device="cpu")
ALIGNMENT = 64  # of the workspace: a cache line
MAX_THREADS = 1024  # as in kernels.cpp
SMALL = 1 << 20  # products that one thread does in some 20 µs


def refusal(x: Tensor, *, any_dtype: bool = False) -> str | None:
    """The reason why the compiled kernels cannot read this tensor; None if they can."""
    if x.device.type != "cpu":
        return f"the tensors are on {x.device}"
    exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    if exporting and torch.onnx.is_in_onnx_export():
        return "inside torch.onnx.export, and ONNX knows none of the custom ops"
    reason = transform()
    if reason is None and not any_dtype and x.dtype not in DTYPES:
        return f"the dtype is {x.dtype}, and the kernels compute in fp32"
    return reason


def run(kernel: str, **arguments: Any) -> None:
    """Run `kernel`, whose arguments are the fields of its structure in `csrc/arguments.hpp`, each by its name.

    The kernel returns how much workspace it needs, which torch allocates.

    Tensors that the kernel reads may have any strides; those that it writes must be contiguous or have contiguous rows.

    Raises:
        TypeError: a field is missing, unknown or of another dtype.
        ValueError: a list of tokens among the arguments names one that is not there.
    """
    held: list[Any] = []  # tensors that must live until the kernel is done
    packed = structure_of(kernel).pack(arguments, held)
    function = getattr(library(), f"subquad_{kernel}")
    # From torch's allocator, so that its profilers see all memory; uninitialised: kernels read only what they wrote.
    workspace = torch.empty(function(packed, None) + ALIGNMENT, dtype=torch.uint8, device="cpu")
    if function(packed, -(-workspace.data_ptr() // ALIGNMENT) * ALIGNMENT) < 0:
        raise ValueError(
            f"the kernel {kernel!r} was given lists that do not fit its tensors: pass those that the forward pass made"
        )


def repeated(kernel: str, names: tuple[str, ...], **arguments: Any) -> Callable[..., None]:
    """`run` as a function of the tensors of these names, rows of a shape and a dtype; the others stay as they are.

    What does not change between calls is packed once. The arguments are those of a call whose tensors are like those
    to come.

    Raises:
        ValueError: from the function, for a tensor of another shape or dtype.
    """
    held: list[Any] = []
    structure, like = structure_of(kernel), [(arguments[name].shape, arguments[name].dtype) for name in names]
    packed = bytearray(structure.pack(arguments, held))
    starts = [structure.offsets[name] for name in names]
    function = getattr(library(), f"subquad_{kernel}")
    others = [each for name, each in arguments.items() if name not in names]  # whose memory the kernel reads or writes

    def run(*tensors: Tensor) -> None:
        buffer, copies = packed.copy(), []
        for x, start, (shape, dtype) in zip(tensors, starts, like, strict=True):
            if x.shape != shape or x.dtype != dtype:
                raise ValueError(
                    f"{kernel!r} was prepared for {tuple(shape)} of {dtype}, not {tuple(x.shape)} of {x.dtype}"
                )
            batch, head, token, element = x.stride()
            if element != 1:
                x = x.contiguous()
                copies.append(x)
                batch, head, token, _ = x.stride()
            ROWS.pack_into(buffer, start, x.data_ptr(), batch, head, token)
        now = bytes(buffer)
        # Its size may depend on the addresses and strides.
        workspace = torch.empty(function(now, None) + ALIGNMENT, dtype=torch.uint8, device="cpu")
        function(now, -(-workspace.data_ptr() // ALIGNMENT) * ALIGNMENT)

    run.held = held, others  # type: ignore[attr-defined]
    return run


@cache
def structure_of(kernel: str) -> Structure:
    """The structure of a kernel's arguments."""
    return Structure(described()["kernels"][kernel], described()["structures"])


def check(
    op: str, heads: tuple[int, int] = (1, 1), /, **tensors: tuple[Tensor | None, torch.dtype, tuple[int, ...]]
) -> None:
    """Check what kernels rely on: that tensors have the dtype and the shape that go with each other.

    `heads`: those of queries and of keys; each key head is shared by equally many query heads.

    Raises:
        ValueError: an op was called by hand with tensors that do not fit together; the message names them.
    """
    H, G = heads
    if G < 1 or H % G:
        raise ValueError(f"{op}: the {H} query heads are not a multiple of the {G} key heads")
    for name, (x, dtype, shape) in tensors.items():
        if x is not None and (x.dtype != dtype or x.shape != shape):
            have = f"{tuple(x.shape)} of {x.dtype}"
            raise ValueError(f"{op}: `{name}` is {have}, but the other tensors go with {shape} of {dtype}")


def threads(products: int) -> int:
    """Torch's number of threads; 1 for so little work that waking the others would take longer than it."""
    return min(torch.get_num_threads(), MAX_THREADS) if products >= SMALL else 1
