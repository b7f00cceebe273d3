"""Calls of kernels with the memory that they read and write, as bytes that `replay.cpp` reads.

All integers are int64, little-endian; a text is its length and its bytes. A file is the description of the C interface,
the number of cases, and for each of them:

    name
    buffers:      count, then for each its length and its bytes before the first call
    addresses:    count, then for each: a buffer, where in it; and the buffer to whose address it is set, and the offset
    calls:        count, then for each the kernel's name and the buffer that holds its arguments
    comparisons:  count, then for each: name, buffer, offset, dtype, axes, sizes, strides in elements, the absolute
                  and the relative tolerance as doubles, then the expected elements: doubles, or int64 of whole numbers

The structures of the arguments are buffers too, and lists of structures.
"""

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from subquad.kernels.native import described, interface

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)  # as in replay.cpp


class Recording:
    """The calls of kernels inside `recorded`."""

    def __init__(self) -> None:
        self.buffers: list[bytes] = []
        self.addresses: list[tuple[int, int, int, int]] = []
        self.calls: list[tuple[str, int]] = []
        self.comparisons: list[bytes] = []
        self._started: dict[int, tuple[int, int]] = {}  # address -> its buffer, and the length
        self._alive: list[Any] = []  # so that no address is used twice

    def call(self, kernel: str, arguments: dict[str, Any]) -> None:
        """Add a call, with the memory of its arguments as it is now."""
        held: list[Any] = []
        structure = interface.structure_of(kernel)
        packed = structure.pack(arguments, held)
        memory = [*_tensors(arguments), *held]
        self._alive += [arguments, held]
        number = self._add(packed)
        self._point(structure.name, packed, number, memory)
        self.calls.append((kernel, number))

    def compare(self, name: str, have: Tensor, want: Tensor, tolerance: tuple[float, float]) -> None:
        """Expect `want` where a kernel wrote `have`."""
        assert have.shape == want.shape, f"{name}: {tuple(have.shape)}, but the reference has {tuple(want.shape)}"
        buffer, offset = self._place(have.data_ptr(), [])
        expected = want.detach().contiguous().to(torch.float64 if have.is_floating_point() else torch.int64)
        numbers = [buffer, offset, DTYPES.index(have.dtype), have.ndim, *have.shape, *have.stride()]
        self.comparisons.append(_text(name) + _int64(*numbers) + struct.pack("=2d", *tolerance) + _bytes_of(expected))

    def packed(self, name: str) -> bytes:
        """The case in the file."""
        buffers = [_int64(len(each)) + each for each in self.buffers]
        addresses = [_int64(*each) for each in self.addresses]
        calls = [_text(kernel) + _int64(buffer) for kernel, buffer in self.calls]
        parts = buffers, addresses, calls, self.comparisons
        return _text(name) + b"".join(_int64(len(part)) + b"".join(part) for part in parts)

    def _add(self, contents: bytes) -> int:
        self.buffers.append(contents)
        return len(self.buffers) - 1

    def _point(self, name: str, contents: bytes, number: int, memory: list[Any], start: int = 0) -> None:
        """Add the addresses in a structure, and in the structures that it has or lists."""
        structures = described()["structures"]
        for _, kind, offset in structures[name][1:]:
            at, inner = start + offset, kind.removesuffix(" list")
            if kind in structures:
                self._point(kind, contents, number, memory, at)
            elif kind.endswith(" list"):
                address, count = struct.unpack_from("=2q", contents, at)
                size = structures[inner][0]
                listed = ctypes.string_at(address, count * size)
                items = self._add(listed)
                self.addresses.append((number, at, items, 0))
                for item in range(count):
                    self._point(inner, listed, items, memory, item * size)
            elif kind.startswith("rows") or "*" in kind:
                (address,) = struct.unpack_from("=q", contents, at)
                if address:
                    place = self._place(address, memory, written=kind.endswith("out"))
                    self.addresses.append((number, at, *place))

    def _place(self, address: int, memory: list[Any], *, written: bool = False) -> tuple[int, int]:
        """The buffer of an address, and the offset; a new buffer for new memory: rubbish where one writes first."""
        for start, (number, length) in self._started.items():
            if start <= address < start + length:
                return number, address - start
        for each in memory:
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                start, length = storage.data_ptr(), storage.nbytes()
                if start <= address < start + length:
                    contents = b"\xff" * length if written else ctypes.string_at(start, length)
                    self._started[start] = self._add(contents), length
                    return self._started[start][0], address - start
        raise LookupError("no kernel of this case wrote the tensor, nor was it given to one")


@contextmanager
def recorded(threads: int) -> Iterator[Recording]:
    """Record the kernels that run inside the block, each on so many threads."""
    recording, run, chosen_threads = Recording(), interface.run, interface.threads

    def record_and_run(kernel: str, **arguments: Any) -> None:
        recording.call(kernel, arguments)
        run(kernel, **arguments)

    interface.run, interface.threads = record_and_run, lambda products: threads
    try:
        yield recording
    finally:
        interface.run, interface.threads = run, chosen_threads


def file_of(cases: dict[str, Recording]) -> bytes:
    """The file of some cases."""
    from subquad.kernels.native import library

    return (
        _text(library().subquad_interface().decode())
        + _int64(len(cases))
        + b"".join(case.packed(name) for name, case in cases.items())
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _int64(*numbers: int) -> bytes:
    return struct.pack(f"={len(numbers)}q", *numbers)


def _text(text: str) -> bytes:
    return _int64(len(text.encode())) + text.encode()


def _bytes_of(x: Tensor) -> bytes:
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()) if x.numel() else b""
