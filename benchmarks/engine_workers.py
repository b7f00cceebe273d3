"""One process for each engine, which runs one call at a time when it is asked to.

The thread pools of several engines in one process wait for work by spinning, and take processor time from one another.
In processes of their own, of which one works at a time, they disturb nobody: before each call all others are idle for
`PAUSE` seconds, which is longer than their pools spin.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PAUSE = 0.1
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": (),
    "flexattention": (),
    "subquad": (),
    "zentorch": ("zentorch",),
    "openvino": ("openvino", "nncf"),
    "xattention": ("openvino",),
    "onnxruntime": ("onnxruntime", "onnx", "onnxscript"),
    "llama.cpp": ("llama-cpp-python", "gguf"),
}
NAMES = {
    "torch": "PyTorch",
    "flexattention": "PyTorch, FlexAttention compiled",
    "zentorch": "PyTorch, compiled by zentorch",
    "openvino": "OpenVINO",
    "xattention": "OpenVINO",
    "onnxruntime": "ONNX Runtime",
}
FLOATS = ("fp32", "bf16", "fp16")
FLASH, NO_FLASH = "with flash attention", "without flash attention"  # of llama.cpp


@dataclass(frozen=True)
class Row:
    """One way to run a model."""

    engine: str  # of PACKAGES
    numbers: str  # fp32, bf16, fp16, or what its weights are rounded to
    method: str | None = None  # of subquad, or which attention of the engine; None: the one that it takes by itself

    @property
    def process(self) -> str:
        """The process that it runs in."""
        return "torch" if self.engine == "subquad" else self.engine

    @property
    def label(self) -> str:
        """The engine as a table names it."""
        name = NAMES.get(self.engine, self.engine)
        if self.method is None:
            return name
        return f"{name} `{self.method}`" if self.engine == "subquad" else f"{name} {self.method}"

    @property
    def is_exact(self) -> bool:
        """True if it runs exact attention with the model's weights in a floating-point format."""
        exact = self.method in (None, FLASH, NO_FLASH) or self.method.partition(":")[0] == "full"
        return exact and self.numbers in FLOATS

    def __str__(self) -> str:
        return f"{self.label}, {self.numbers}"


class Job(NamedTuple):
    """A model at a length, on some threads; converted models are in `folder`."""

    model: str
    length: int
    threads: int
    folder: Path


class EngineError(RuntimeError):
    """An engine cannot run a row; the text is the reason."""


class Worker:
    """A process that runs rows of one engine. `prepare`: what loads them; by default whole models without a cache."""

    def __init__(self, prepare: Callable[..., dict[Any, Any]] | None = None):
        context = multiprocessing.get_context("spawn")  # a fork of a process with thread pools may hang
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, prepare), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *request: Any) -> Any:
        """Send a request, and wait for its result.

        Raises:
            EngineError: it failed, or the process ended.
        """
        try:
            self.connection.send(request)
            failure, result = self.connection.recv()
        except (EOFError, OSError) as error:
            raise EngineError(f"its process ended (exit code {self.process.exitcode}); is memory short?") from error
        if failure is not None:
            raise EngineError(failure)
        return result

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self.connection.send(("close",))
        self.process.join(10)
        self.process.terminate()


def serve(connection: Connection, prepare: Callable[..., dict[Any, Any]] | None = None) -> None:
    """Answer requests until "close": ("prepare", job, rows), ("run", row, ids)."""
    runs: dict[Any, Any] = {}
    while True:
        request = connection.recv()
        if request[0] == "close":
            return
        try:
            if request[0] == "prepare":
                runs.clear()  # the models of the job before
                runs.update((prepare or whole_models)(*request[1:]))
                result: Any = {row: run for row, run in runs.items() if isinstance(run, str)}
            else:
                result = timed(runs[request[1]], request[2])
            answer = None, result
        except Exception as error:  # of an engine's own code; the other rows go on
            answer = reason(error), None
        connection.send(answer)


def timed(run: Callable[[np.ndarray], Any], ids: np.ndarray) -> tuple[float, Any]:
    """Seconds of a call and its result; a result that is a function is called after the time was taken."""
    time.sleep(PAUSE)
    start = time.perf_counter()
    result = run(ids)
    seconds = time.perf_counter() - start
    return seconds, result() if callable(result) else result


def whole_models(job: Job, rows: Sequence[Row]) -> dict[Row, Any]:
    """The run of each row of one process, or the reason why there is none."""
    import torch  # here, because the command that starts processes must not wait for it twice
    from engine_models import Converted, onnxruntime_runs, openvino_runs, pretrained, torch_module, torch_run

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch.set_num_threads(job.threads)
    model, process = pretrained(job.model, job.length), rows[0].process
    converters = {"openvino": openvino_runs, "xattention": openvino_runs, "onnxruntime": onnxruntime_runs}
    if process in converters:
        converted = Converted(job.folder, job.model, job.length, PACKAGES[process])
        loaders = converters[process](converted, model, job.threads)

        def load(row: Row) -> Any:
            return loaders[row.numbers if row.method is None else row.method]()
    elif process == "llama.cpp":
        from engine_llama import prefill_run

        def load(row: Row) -> Any:
            return prefill_run(model, job, row)
    else:
        models = {
            numbers: model if numbers == "fp32" else model.in_dtype(torch.bfloat16)
            for numbers in dict.fromkeys(row.numbers for row in rows)
        }

        def load(row: Row) -> Any:
            return torch_run(torch_module(models[row.numbers], row))

    return {row: attempt(load, row) for row in rows}


def attempt(load: Callable[[Any], Any], row: Any) -> Any:
    """Call `load` for a row: its result, or why it failed."""
    try:
        return load(row)
    except Exception as error:  # of an engine's own code; the other rows go on
        return reason(error)


def reason(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
