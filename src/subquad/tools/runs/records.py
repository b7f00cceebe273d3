"""Typed records to plain data that JSON holds, and back; all that runs keep goes through here.

A record is a dataclass of numbers, texts, lists, dicts with text as keys, and records.
A field that is None or NaN is left out if that is its default, and None is null otherwise.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def to_plain(value: Any) -> Any:
    """Returns plain data for a record, or for lists and dicts of records.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Found:
    ...     crossover: float | None = math.nan
    >>> to_plain([Found(), Found(float("nan")), Found(None)])
    [{}, {}, {'crossover': None}]
    """
    if is_dataclass(value):
        held = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: to_plain(each) for f, each in held if not _is_absent(each, f.default)}
    if isinstance(value, Mapping):
        return {key: to_plain(held) for key, held in value.items()}
    return [to_plain(held) for held in value] if isinstance(value, list | tuple) else value


def from_plain(kind: Any, plain: Any) -> Any:
    """Returns what `to_plain` took, of this type.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Timed:
    ...     seconds: list[float]
    ...     growth: float | None
    ...     reason: str | None = None
    >>> to_plain({"full": Timed([0.5], None)})
    {'full': {'seconds': [0.5], 'growth': None}}
    >>> from_plain(dict[str, Timed], {"full": {"seconds": [0.5], "growth": None}})
    {'full': Timed(seconds=[0.5], growth=None, reason=None)}

    Raises:
        TypeError: the data lacks a field of a record, or has one that the record does not.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return from_plain(_member(arguments, plain), plain)
    if is_dataclass(kind):
        types = get_type_hints(kind)
        return kind(**{name: from_plain(types.get(name), held) for name, held in plain.items()})  # type: ignore[operator]
    if origin is dict:
        return {key: from_plain(arguments[1], held) for key, held in plain.items()}
    if kind is float and plain is None:  # JSON has no NaN
        return float("nan")
    return [from_plain(arguments[0], held) for held in plain] if origin is list else plain


def _is_absent(value: Any, default: Any) -> bool:
    if isinstance(value, float) and isinstance(default, float):
        return math.isnan(value) and math.isnan(default)
    return value is None and default is None


def _member(union: tuple[Any, ...], plain: Any) -> Any:
    """The type of a union that this is of: None, the record with these fields, or the one that is neither."""
    if plain is None:
        return NoneType
    kinds = [kind for kind in union if kind is not NoneType]
    return next((kind for kind in kinds if is_dataclass(kind) and _fits(kind, plain)), kinds[-1])


def _fits(kind: Any, plain: Any) -> bool:
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    return isinstance(plain, dict) and needed <= plain.keys() <= {f.name for f in fields(kind)}
