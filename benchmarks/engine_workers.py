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
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PAUSE = 0.1
INSTALL = "pip install -c constraints.txt -r benchmarks/engines-requirements.txt"
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": (),
    "subquad": (),
    "openvino": ("openvino", "nncf"),
    "onnxruntime": ("onnxruntime", "onnx", "onnxscript"),
}


@dataclass(frozen=True)
class Row:
    """One way to run a model."""

    engine: str  # of PACKAGES
    numbers: str  # fp32, bf16, "int8 weights", "int8 dynamic"
    method: str | None = None  # of subquad or the engine's sparse attention; None: the model's own

    @property
    def process(self) -> str:
        """The process that it runs in."""
        return "torch" if self.engine == "subquad" else self.engine

    @property
    def label(self) -> str:
        """The engine as a table names it."""
        name = {"torch": "PyTorch", "openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}.get(self.engine, self.engine)
        if self.method is None:
            return name
        return f"{name} `{self.method}`" if self.engine == "subquad" else f"{name} {self.method}"

    @property
    def is_exact(self) -> bool:
        """True if it runs exact attention with the model's weights in fp32 or bf16."""
        exact = self.method is None or self.method.partition(":")[0] == "full"
        return exact and self.numbers in ("fp32", "bf16")

    def __str__(self) -> str:
        return f"{self.label}, {self.numbers}"


class Job(NamedTuple):
    """A model at a length, on some threads; converted models are in `folder`."""

    model: str
    length: int
    threads: int
    folder: Path


def sparse_name(threshold: float) -> str:
    """OpenVINO's sparse attention as a row's method."""
    return f"XAttention, threshold {threshold}"


class EngineError(RuntimeError):
    """An engine cannot run a row; the text is the reason."""


def missing(engine: str) -> str | None:
    """The message if packages of an engine are not installed."""
    absent = [package for package in PACKAGES[engine] if find_spec(package) is None]
    return f"{engine}: {', '.join(absent)} not installed: {INSTALL}" if absent else None


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
    """Seconds of a call and its result."""
    time.sleep(PAUSE)
    start = time.perf_counter()
    result = run(ids)
    return time.perf_counter() - start, result


def whole_models(job: Job, rows: Sequence[Row]) -> dict[Row, Any]:
    """The run of each row of one process, or the reason why there is none."""
    import torch  # here, because the command that starts processes must not wait for it twice
    from engine_models import Converted, onnxruntime_runs, openvino_runs, pretrained, swapped, torch_run

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    torch.set_num_threads(job.threads)
    model, process = pretrained(job.model, job.length), rows[0].process
    if process == "torch":
        models = {
            numbers: model if numbers == "fp32" else model.in_dtype(torch.bfloat16)
            for numbers in dict.fromkeys(row.numbers for row in rows)
        }

        def load(row: Row) -> Any:
            return torch_run(swapped(models[row.numbers], row.method))
    else:
        makers = {"openvino": openvino_runs, "onnxruntime": onnxruntime_runs}
        converted = Converted(job.folder, job.model, job.length, PACKAGES[process])
        loaders = makers[process](converted, model, job.threads)

        def load(row: Row) -> Any:
            return loaders[row.numbers if row.method is None else row.method]()

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
