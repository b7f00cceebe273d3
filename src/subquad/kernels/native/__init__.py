"""The native library of compiled CPU kernels: how it is found, loaded and asked what it can do.

It is plain C++ behind plain C functions, called with ctypes, and knows nothing of Python or PyTorch. What can go wrong
(no library in this install, a damaged one, one of another version) is data, `refusal()`: all else runs without it.
"""

import ctypes
import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import environ
from pathlib import Path
from typing import Any, NamedTuple

import torch  # noqa: F401  (first: its wheel brings the OpenMP runtime, and the library must use the one that is loaded)

from subquad.kernels import dispatch as backends

ABI_VERSION = 20  # as in abi.cpp
_FILE = {"darwin": "libsubquad.dylib", "win32": "subquad.dll"}.get(sys.platform, "libsubquad.so")
_HOW = "Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install"
_AGAIN = "run `pip install -v --force-reinstall --no-deps .` in subquad's folder"  # -v shows what fails


class Refusal(NamedTuple):
    """The reason why the native library cannot be used here, and the remedy."""

    cause: str
    remedy: str


def library() -> ctypes.CDLL:
    """The native library, loaded.

    Raises:
        RuntimeError: it cannot be used here (with the reason).
    """
    if _LIBRARY is None:
        raise RuntimeError(f"subquad's native library cannot be used: {_MESSAGE}")
    return _LIBRARY


def refusal() -> str | None:
    """The reason why the native library cannot be used here, with the remedy, or None when it can."""
    return _MESSAGE


def cause() -> str | None:
    """The reason why the native library cannot be used here, without the remedy, or None when it can."""
    return None if _REFUSAL is None else _REFUSAL.cause


def variants() -> list[str]:
    """The instruction-set variants of the kernels that run on this CPU, fastest first."""
    return library().subquad_variants().decode().split()


def variant() -> str:
    """The variant in use."""
    return library().subquad_variant().decode()


@contextmanager
def use_variant(name: str) -> Iterator[None]:
    """Force one variant inside the block, for all threads of the process.

    Raises:
        ValueError: no variant of that name runs here.
    """
    before = variant()
    if name not in variants():
        raise ValueError(f"no variant {name!r} runs here; there are {', '.join(variants())}")
    library().subquad_use_variant(name.encode())
    try:
        yield
    finally:
        library().subquad_use_variant(before.encode())


def is_vectorised() -> bool:
    """True if there is a variant for this CPU's vector instructions: AVX2 or better, or NEON."""
    return _VECTORISED


def has_threads() -> bool:
    """True if kernels run on several threads: those of OpenMP or, on macOS, of Grand Central Dispatch."""
    return bool(library().subquad_has_threads())


def described() -> dict[str, dict[str, Any]]:
    """The C interface as the library describes it: "structures", by name, and the structure of each of "kernels"."""
    return json.loads(library().subquad_interface())


def _find() -> tuple[ctypes.CDLL | None, Refusal | None]:
    """The library, or why there is none."""
    path = Path(__file__).with_name(_FILE)
    return _load(path) if path.is_file() else (None, _missing())


def _load(path: Path) -> tuple[ctypes.CDLL | None, Refusal | None]:
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.subquad_variants.restype = loaded.subquad_variant.restype = ctypes.c_char_p
        loaded.subquad_use_variant.argtypes = [ctypes.c_char_p]
        version = loaded.subquad_abi_version()
        if version != ABI_VERSION:
            return None, Refusal(f"{path} has interface {version} but this Python code calls {ABI_VERSION}", _AGAIN)
        _declare_kernels(loaded)
    except (OSError, AttributeError) as error:
        return None, Refusal(f"the compiled library cannot be loaded ({error})", _AGAIN)
    return loaded, None


def _declare_kernels(loaded: ctypes.CDLL) -> None:
    loaded.subquad_interface.restype = ctypes.c_char_p
    for kernel in json.loads(loaded.subquad_interface())["kernels"]:
        function = getattr(loaded, f"subquad_{kernel}")
        function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_void_p], ctypes.c_int64


def _missing() -> Refusal:
    path = compiler()
    if path is None:
        cause = "no compiled library in this install, for want of a C++ compiler"
        return Refusal(cause, f"install one ({_HOW}), then {_AGAIN}")
    return Refusal(f"no compiled library in this install, though there is a C++ compiler now ({path})", _AGAIN)


def compiler() -> str | None:
    """The C++ compiler that a build would take, or None."""
    inputs = shlex.split(environ.get("CXX", ""))[:1]
    return next(filter(None, map(shutil.which, inputs or ["c++", "g++", "clang++", "cl"])), None)


# When this module is imported, not later: it costs about a millisecond, once, and torch.compile meets plain values.
_LIBRARY, _REFUSAL = _find()
_MESSAGE = None if _REFUSAL is None else ": ".join(_REFUSAL)
_VECTORISED = _LIBRARY is not None and variants()[0] != "baseline"
backends.register("cpu", refusal)
