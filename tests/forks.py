"""Run programs of tests in processes that are forked from one that has imported torch and transformers.

So they do not import these themselves, which takes longer than most of the programs. What modules read from the
environment when they are imported is that of the first call in a process of tests. Programs end without Python's exit
handlers, as all processes of `multiprocessing` do.
"""

import gc
import io
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LIMIT = 1800  # seconds that a program may take

# Modules that raise ImportError, such as those of research where it is not installed, are skipped. None may start a
# thread: a forked process would lack it.
PRELOADED = ["torch._inductor.compile_fx", "subquad.hf", "tests.library.hf.models"]
PRELOADED += [f"tests.library.distributed.{name}" for name in ("cases", "combined", "disagreeing", "models")]
PRELOADED += ["tests.research.training.split", "tests.research.training.two"]


def start_forked(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a process that calls a function; where processes cannot be forked, it imports everything itself."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        process: BaseProcess = multiprocessing.get_context("spawn").Process(target=target, args=args)
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        process = context.Process(target=_call, args=(dict(os.environ), target, *args))
    process.start()
    return process


def _call(variables: dict[str, str], target: Callable[..., None], *args: Any) -> None:
    gc.freeze()  # so that garbage is not looked for among what was imported
    os.environ.clear()
    os.environ.update(variables)
    target(*args)


def output_of(module: str, *arguments: str, stdin: str = "") -> str:
    """Run a module as a program and return what it writes to its standard output.

    Raises:
        AssertionError: the program failed or exceeded the limit; with the end of its standard error.
    """
    with TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        for file in (out, errors):
            file.touch()
        process = start_forked(_run_program, module, arguments, stdin, out, errors)
        try:
            process.join(LIMIT)
            ended = f"ended with exit code {process.exitcode}" if process.exitcode is not None else "took too long"
        finally:
            process.kill()
        said = errors.read_text("utf-8", errors="replace")
        assert process.exitcode == 0, f"{module} {ended}: {said[-3000:]}"
        return out.read_text("utf-8")


def _run_program(module: str, arguments: tuple[str, ...], stdin: str, out: Path, errors: Path) -> None:
    sys.stdin = io.StringIO(stdin)
    redirect(1, out)
    redirect(2, errors)
    run(module, *arguments)


def redirect(descriptor: int, file: Path) -> None:
    """Let this process write to a file what it writes to a descriptor."""
    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), descriptor)


def run(module: str, *arguments: str) -> None:
    """Run a module in this process as `python -m` does."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
