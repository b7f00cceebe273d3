"""The place in the code that calls SDPA, from the Python stack."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from torch import nn

_HERE = __name__.rpartition(".")[0]
_OURS = _HERE.partition(".")[0]
_CHECKERS = ("jaxtyping", "beartype")  # frames around what they check


class Caller(NamedTuple):
    """The module whose forward calls, the outermost one that is running, and the line of code."""

    module: nn.Module | None
    root: nn.Module | None
    line: str


def caller() -> Caller:
    """The current caller of SDPA."""
    frames = list(_outside(sys._getframe(1)))
    modules = [owner for owner in map(_owner, frames) if isinstance(owner, nn.Module)]
    code = frames[0].f_code
    line = f"{code.co_name} ({Path(code.co_filename).name}:{frames[0].f_lineno})"
    return Caller(modules[0] if modules else None, modules[-1] if modules else None, line)


def is_ours() -> bool:
    """True if subquad's own exact attention calls SDPA now."""
    return _package(next(_outside(sys._getframe(1)))) == _OURS


def _outside(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames from this one outwards, without those of this folder and of checks of types around them."""
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(_HERE) and _package(frame) not in _CHECKERS:
            yield frame
        frame = frame.f_back


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _owner(frame: FrameType) -> object:
    """The value of `self` in a frame."""
    return frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
