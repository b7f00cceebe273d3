"""Programs of tests as processes that are forked from one that has imported what they need.

To import torch and transformers takes a process five seconds.
"""

import gc
import io
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LONGEST = 300  # seconds until a program is ended

# A module that cannot be imported, as those of research without it, is left out and fails in its own program. None may
# start a thread, which a fork would not have.
IMPORTED = ["torch._inductor.compile_fx", "subquad.hf", "tests.library.hf.models"]
IMPORTED += [f"tests.library.distributed.{name}" for name in ("cases", "combined", "disagreeing", "models")]
IMPORTED += ["tests.research.training.split", "tests.research.training.two"]


def forked(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """Start a process that calls a function."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=_called, args=(dict(os.environ), target, *args))
    process.start()
    return process


def _called(variables: dict[str, str], target: Callable[..., None], *args: Any) -> None:
    gc.freeze()  # garbage is looked for among what the program makes
    os.environ.clear()  # of the process when the first program was forked
    os.environ.update(variables)
    target(*args)


def printed(module: str, *words: str, read: str = "") -> str:
    """Run a module as a program and return what it wrote to its standard output.

    Raises:
        AssertionError: it failed; with the end of its standard error.
    """
    with TemporaryDirectory() as folder:
        process = forked(_be_program, module, words, read, Path(folder))
        process.join(LONGEST)
        late = process.exitcode is None
        if late:
            process.kill()
            process.join()
        out, errors = (Path(folder, name).read_text() for name in ("out", "errors"))
    assert not late, f"{module} did not end within {LONGEST} s: {errors[-3000:]}"
    assert process.exitcode == 0, errors[-3000:]
    return out


def _be_program(module: str, words: tuple[str, ...], read: str, folder: Path) -> None:
    sys.stdin = io.StringIO(read)
    redirect(1, folder / "out")
    redirect(2, folder / "errors")
    run(module, *words)


def redirect(descriptor: int, file: Path) -> None:
    """Let a process write what it writes to a descriptor to a new file."""
    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), descriptor)


def run(module: str, *words: str) -> None:
    """Run a module as `python -m` does."""
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
