"""Launches that are written down instead of run, so that kernels can be compiled and counted without a GPU.

    with recording() as launches:
        sq.attention(*torch.empty(3, 1, 32, 4096, 64, dtype=torch.bfloat16, device="meta"), method="clustered-tail")

Tensors on the meta device have shapes and no numbers. So what is recorded is what a GPU would be asked for, and a
number that is read back from a device, or a shape that follows data, is an error.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from subquad.kernels import dispatch as backends
from subquad.kernels import triton

_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_ALIGNED = 16  # bytes of an address, and what divides a number, where the compiler reads vectors


@dataclass(frozen=True)
class LaunchCost:
    """The cost of a launch.

    Attributes:
        products: multiply-adds of matrix products.
        bytes: bytes that pass between the chip and its memory.
        operations: operations on single numbers, outside of matrix products; counted where they take the most time.
    """

    products: int = 0
    bytes: int = 0
    operations: int = 0


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its grid, and what decides the code that the compiler makes for it.

    Attributes:
        kernel: the function that `triton.jit` made.
        grid: the numbers of programs.
        signature: the type of each argument: "*bf16" for a pointer, "i32", "constexpr".
        constants: the values of those that are constants of the compiled code.
        aligned: the arguments that are divisible by 16.
        options: "num_warps" and "num_stages".
        cost: the cost of the launch, by the shapes.
    """

    kernel: Any
    grid: tuple[int, ...]
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...]
    options: dict[str, int]
    cost: LaunchCost

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.__name__)

    @property
    def code(self) -> tuple[str, ...]:
        """The key of the code that the compiler makes: two launches with the same key run the same code."""
        made_of = self.signature, self.constants, self.aligned, self.options
        return self.kernel.__module__, self.name, *map(str, made_of)

    @staticmethod
    def record(
        kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, int], cost: LaunchCost
    ) -> "Launch":
        """Describe a launch as Triton would specialise it: on 1, on divisibility by 16, and on what is not there."""
        signature, constants, aligned = {}, {}, []
        for parameter in kernel.params:
            name, value = parameter.name, arguments[parameter.name]
            number = isinstance(value, int) and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (number and value == 1):
                signature[name], constants[name] = "constexpr", value
                continue
            signature[name] = _type(value)
            if isinstance(value, Tensor) or (number and value % _ALIGNED == 0):
                aligned.append(name)
        return Launch(kernel, grid, signature, constants, tuple(aligned), options, cost)


def _type(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


@dataclass(frozen=True)
class OtherCall:
    """One call of torch, apart from our own kernels: an elementwise function, a sort, a product.

    Attributes:
        name: the operator's.
        numbers: elements of its largest tensor.
        bytes: size of all tensors that it reads and writes, each once.
        products: multiply-adds, if it is a product of matrices.
        upcast: whether these are of fp32.
    """

    name: str
    numbers: int
    bytes: int
    products: int = 0
    upcast: bool = False


class _Others(TorchDispatchMode):
    """Notes what torch itself would launch: all operators but ours, and but those that only look at a tensor anew.

    Whether `to` or `contiguous` copies shows in its result: a copy has memory of its own.
    """

    def __init__(self, calls: list[OtherCall]):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        writes = any(x.alias_info is not None and x.alias_info.is_write for x in func._schema.arguments)
        inputs = {_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        looks = all(_memory(x) in inputs for x in tree_leaves(results) if isinstance(x, Tensor)) and not writes
        name = func.overloadpacket.__name__
        empty = name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
        if func.namespace != "subquad" and not looks and not empty:
            read = () if name.startswith(_FILLS) else (args, kwargs)  # a filled tensor takes no numbers of its model
            tensors = {id(x): x for x in tree_leaves((read, results)) if isinstance(x, Tensor)}.values()
            largest = max((x.numel() for x in tensors), default=0)
            self.calls.append(OtherCall(name, largest, sum(map(_bytes, tensors)), *_products(name, args, results)))
        return results


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


_FILLS = "new_", "zeros", "ones", "full", "fill_", "zero_"
_MATRICES = {"mm": 0, "bmm": 0, "matmul": 0, "addmm": 1, "baddbmm": 1}  # the operator, and which argument is the left


def _bytes(x: Tensor) -> int:
    """The bytes of the numbers that are there: an expanded tensor holds each once."""
    held = [size for size, step in zip(x.shape, x.stride(), strict=True) if step != 0]
    return prod(held) * x.element_size()


def _products(name: str, args: Any, results: Any) -> tuple[int, bool]:
    if name not in _MATRICES:
        return 0, False
    return results.numel() * args[_MATRICES[name]].shape[-1], results.dtype.itemsize > 2


_launches: ContextVar[list[Launch] | None] = ContextVar("subquad_launches", default=None)


def recorded() -> list[Launch] | None:
    """The launches of the block that is open, to be added to; None outside of one."""
    return _launches.get()


@contextmanager
def recording(others: list[OtherCall] | None = None) -> Iterator[list[Launch]]:
    """Record the launches of calls on meta tensors inside the block, which run on the backend "triton" alone.

    Args:
        others: a list to which the calls of torch's own operators are added, where it is given.

    Raises:
        RuntimeError: the kernels were imported for Triton's interpreter, or Triton is not installed.
    """
    if triton.INTERPRETED or not triton.usable():
        raise RuntimeError("launches are recorded where Triton is installed and TRITON_INTERPRET is not set")
    triton.load()
    launches: list[Launch] = []
    token = _launches.set(launches)
    try:

        def inside() -> AbstractContextManager[Any]:
            return nullcontext() if others is None else _Others(others)

        with backends.tracing("triton", inside), inside():
            yield launches
    finally:
        _launches.reset(token)
