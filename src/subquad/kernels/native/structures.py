"""The structures of the C interface: they lie as the library describes them, and are filled from values by name.

A field of numbers takes a number; one of rows, or with an address, takes a tensor (None: null), which is held until the
kernel is done; a structure takes a mapping of its fields, a list of structures takes a list of mappings.
"""

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in layout.hpp
ROWS = struct.Struct("=Q3q")  # an address, and the strides of the first three of four axes
_NUMBERS = {"int64": "q", "int32": "i"}
_ELEMENTS = {"bool": torch.bool, "int32": torch.int32, "int64": torch.int64}
_ELEMENTS |= {"float32": torch.float32, "float64": torch.float64}


class Packing:
    """The numbers of a structure so far, in the order of its fields, and what must live until they are read."""

    def __init__(self) -> None:
        self.numbers: list[Any] = []
        self.held: list[Any] = []


Fill = Callable[[Any, Packing], None]  # puts the numbers of one value there


class Field(NamedTuple):
    """A field: its name, how its numbers are packed, and what puts them there; None: the value is the number."""

    name: str
    format: str
    fill: Fill | None


class Structure:
    """One structure, from the library's description: its bytes, and each field's name, kind and offset."""

    def __init__(self, name: str, described: Mapping[str, list[Any]]):
        self.name, self.fields, self.format, end = name, list[Field](), "=", 0
        self.offsets = {field: offset for field, _, offset in described[name][1:]}
        size, *fields = described[name]
        for field, kind, offset in fields:
            self.fields.append(_field(field, kind, described))
            self.format += f"{offset - end}x{self.fields[-1].format}"  # the compiler may align fields
            end = offset + struct.calcsize("=" + self.fields[-1].format)
        self.format += f"{size - end}x"
        self._names, self._packer = {field.name for field in self.fields}, struct.Struct(self.format)

    def fill(self, values: Mapping[str, Any], to: Packing) -> None:
        """Put each field's value there.

        Raises:
            TypeError: `values` lack a field or name one that is not there, or a tensor does not have a field's dtype.
        """
        if values.keys() != self._names:
            missing, unknown = sorted(self._names - values.keys()), sorted(values.keys() - self._names)
            raise TypeError(
                f"{self.name}: missing {missing}, unknown {unknown}; the compiled library and this Python code are not "
                "of one version"
            )
        name = ""
        try:
            for name, _, fill in self.fields:
                if fill is None:
                    to.numbers.append(values[name])
                else:
                    fill(values[name], to)
        except TypeError as error:
            raise TypeError(f"{self.name}.{name}: {error}") from None

    def pack(self, values: Mapping[str, Any], held: list[Any]) -> bytes:
        """The structure in memory. `held` gets what must live as long."""
        packing = Packing()
        self.fill(values, packing)
        held += packing.held
        return self._packer.pack(*packing.numbers)


def _field(name: str, kind: str, described: Mapping[str, list[Any]]) -> Field:
    if kind in _NUMBERS:
        return Field(name, _NUMBERS[kind], None)
    if kind == "float32":
        return Field(name, "f", lambda x, to: to.numbers.append(ctypes.c_float(x).value))  # infinity beyond fp32
    if kind == "dtype":
        return Field(name, "i", lambda x, to: to.numbers.append(DTYPES[x]))
    if kind in ("rows", "rows out"):
        return Field(name, ROWS.format[1:], _rows if kind == "rows" else _rows_out)
    type_name, _, pointed = kind.partition(" ") if kind.endswith(" list") else kind.partition("*")
    if pointed == "list":
        return Field(name, "Qq", _list_of(Structure(type_name, described)))
    if type_name in _ELEMENTS:
        return Field(name, "Q", _address_of(_ELEMENTS[type_name], out=pointed == " out"))
    inner = Structure(type_name, described)
    return Field(name, inner.format[1:], inner.fill)


def _rows(x: Tensor | None, to: Packing) -> None:
    if x is None:
        to.numbers += (0, 0, 0, 0)
        return
    batch, head, token, element = x.stride()
    if element != 1 and x.shape[-1] != 1:
        x = x.contiguous()
        to.held.append(x)
        batch, head, token, _ = x.stride()
    to.numbers += (x.data_ptr(), batch, head, token)


def _rows_out(x: Tensor | None, to: Packing) -> None:
    if x is not None and x.stride(-1) != 1 and x.shape[-1] != 1:
        raise TypeError("a kernel writes rows of contiguous elements")
    _rows(x, to)


def _address_of(dtype: torch.dtype, *, out: bool) -> Fill:
    def fill(x: Tensor | None, to: Packing) -> None:
        if x is None:
            to.numbers.append(0)
            return
        if x.dtype != dtype:
            raise TypeError(f"a tensor of {x.dtype} where the kernel reads {dtype}")
        if not x.is_contiguous():
            if out:
                raise TypeError("a kernel writes contiguous tensors")
            x = x.contiguous()
            to.held.append(x)
        to.numbers.append(x.data_ptr())

    return fill


def _list_of(structure: Structure) -> Fill:
    def fill(items: Sequence[Mapping[str, Any]], to: Packing) -> None:
        packed = b"".join(structure.pack(item, to.held) for item in items)
        memory = ctypes.create_string_buffer(packed, max(len(packed), 1))
        to.held.append(memory)
        to.numbers += (ctypes.addressof(memory), len(items))

    return fill
