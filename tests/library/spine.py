"""The path of a call: the functions that a reader opens between `sq.attention` and the compiled kernel.

The call stack at the moment when the kernel is entered is the chain. A stop is

- a function of subquad in the chain, or
- a function that one of these calls on the way, if it makes more than `HELPERS` calls of subquad itself: what it does
  cannot be taken from its name.

Comprehensions belong to the function that they stand in, and functions of other packages are no stops.
"""

import ast
import contextlib
import ctypes
import inspect
import sys
import textwrap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import subquad
from subquad.kernels import native

ROOT = Path(subquad.__file__).parent
HELPERS = 2  # calls that a function makes which is understood by its name


class Stop(NamedTuple):
    """A function: its file below `src/subquad`, and its qualified name."""

    file: str
    function: str


class _Call:
    """A call of a function of subquad, and the calls that it makes."""

    def __init__(self, code: CodeType):
        self.code, self.calls = code, list["_Call"]()

    def count(self) -> int:
        """The calls of subquad below this one."""
        return sum(1 + call.count() for call in self.calls)

    @property
    def stop(self) -> Stop:
        """The function that is called."""
        return Stop(Path(self.code.co_filename).relative_to(ROOT).as_posix(), self.code.co_qualname)


class Walk:
    """The calls of subquad up to the first call of a compiled kernel, while `recording`."""

    def __init__(self) -> None:
        self.stops: list[Stop] = []
        self.chain: list[CodeType] = []
        self._root = _Call(compile("", "", "exec"))
        self._open: list[tuple[FrameType, _Call]] = []

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and _is_ours(code):
            call = _Call(code)
            (self._open[-1][1] if self._open else self._root).calls.append(call)
            self._open.append((frame, call))
        elif event == "return" and self._open and self._open[-1][0] is frame:
            self._open.pop()

    def _entered(self) -> None:
        """Keep the walk of the first kernel."""
        if self.stops:
            return
        chain = [call for _, call in self._open]
        self.chain = [call.code for call in chain]
        for call in chain:
            self.stops.append(call.stop)
            helpers = [each.stop for each in call.calls if each not in chain and each.count() > HELPERS]
            self.stops += [stop for stop in dict.fromkeys(helpers) if stop not in self.stops]


@contextlib.contextmanager
def recording() -> Any:
    """Record the walk of what runs inside the block, to the first kernel of the compiled library."""
    walk, library = Walk(), native.library()

    class Traced(ctypes.CDLL):
        """The library, which tells the walk that one of its functions is about to be called."""

        def __init__(self) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            walk._entered()
            return getattr(library, name)

    with patch.object(native, "_LIBRARY", Traced()):
        sys.setprofile(walk._event)
        try:
            yield walk
        finally:
            sys.setprofile(None)


def left_and_entered_again(stops: list[Stop]) -> list[str]:
    """The files that the walk comes back to after it left them."""
    files = [stop.file for stop in stops]
    runs = [file for i, file in enumerate(files) if i == 0 or files[i - 1] != file]
    return sorted({file for file in runs if runs.count(file) > 1})


def that_pass_on(chain: list[CodeType]) -> list[str]:
    """The functions of a chain whose body is nothing but a call of the next one."""
    return [code.co_qualname for code in chain if _is_one_call(code)]


def _is_one_call(code: CodeType) -> bool:
    lines, _ = inspect.getsourcelines(code)
    (function,) = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(function, ast.FunctionDef)
    body = [node for node in function.body if not _is_docstring(node)]
    return len(body) == 1 and isinstance(body[0], ast.Return | ast.Expr) and isinstance(body[0].value, ast.Call)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(f"{ROOT}/") and not code.co_name.startswith("<")
