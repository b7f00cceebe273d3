"""The methods that have kernels: backends are compared for these, and for the others they would be the same code."""

import functools
from unittest.mock import patch

import subquad as sq
from subquad.kernels.native import interface
from subquad.testing.contract import run
from subquad.testing.oracle import qkv


@functools.cache
def runs_compiled_code(method: sq.Method) -> bool:
    """Tell whether a call of the method reaches the native library."""
    with patch.object(interface, "run", wraps=interface.run) as compiled:
        run(method, *qkv())
    return compiled.called
