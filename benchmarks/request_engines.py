"""Whole requests as PyTorch, OpenVINO and llama.cpp answer them: a prompt, and greedy tokens after it.

All engines have the weights of one model. A row is an engine with a number format, a method and a cache; its run takes
token ids (1, N) and returns an `Answer`. Every run goes on after a token that would end the text.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from engine_workers import EngineError, attempt

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": (),
    "subquad": (),
    "compiled": (),
    "torchao": ("torchao",),
    "openvino": ("openvino", "nncf"),
    "openvino-genai": ("openvino", "nncf", "openvino-genai"),
    "llama.cpp": ("llama-cpp-python", "gguf"),
}
NAMES = {
    "torch": "PyTorch",
    "compiled": "PyTorch",
    "torchao": "PyTorch",
    "openvino": "OpenVINO",
    "openvino-genai": "OpenVINO GenAI",
}
WARM_PROMPT, WARM_TOKENS = 64, 4
FLOATS = ("fp32", "bf16", "fp16")
COMPILED = "static, compiled"  # the names of caches for compiled steps
UNGUARDED = f"{COMPILED}, unguarded"

Run = Callable[[np.ndarray, int], "Answer"]


@dataclass(frozen=True)
class Row:
    """One way to answer a request."""

    engine: str  # of PACKAGES
    weights: str  # fp32, bf16, fp16, or what they are rounded to
    method: str | None = None  # of subquad; None: the engine's own attention
    cache: str | None = None  # "growing" or one of the static ones below; None: the one that the engine makes

    @property
    def process(self) -> str:
        """The process that it runs in; a compiled model has its own, because Dynamo looks among those of all models."""
        if self.is_compiled:
            return str(self)
        return "torch" if self.engine == "subquad" else self.engine

    @property
    def label(self) -> str:
        """The engine, method and cache as a table names them."""
        name = NAMES.get(self.engine, self.engine) if self.method is None else f"subquad `{self.method}`"
        return name if self.cache is None else f"{name}, {self.cache} cache"

    @property
    def is_compiled(self) -> bool:
        """True if `torch.compile` compiles its steps."""
        return self.engine in ("compiled", "torchao")

    @property
    def is_ours(self) -> bool:
        """True if a method of subquad runs in it."""
        return self.method is not None

    @property
    def has_float_weights(self) -> bool:
        """True if weights are stored as floating-point numbers of 16 or 32 bits."""
        return self.weights in FLOATS

    def __str__(self) -> str:
        return f"{self.label}, {self.weights}"


class Job(NamedTuple):
    """Requests of one model: tokens of the prompt and after it, on some threads; converted models are in `folder`."""

    model: str
    prompt: int
    new: int
    threads: int
    folder: Path


class Answer(NamedTuple):
    """Seconds until each token was there, counted from the request, and the tokens."""

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]


def rows_of(engines: Sequence[str], methods: Sequence[str]) -> list[Row]:
    """The rows of some engines."""
    both, static = ("fp32", "bf16"), (COMPILED, UNGUARDED)
    rows: dict[str, list[Row]] = {
        "torch": [Row("torch", numbers) for numbers in both],
        "subquad": [
            Row("subquad", numbers, method, cache)
            for method in methods
            for numbers in both
            for cache in (None, "growing")
        ],
        "compiled": [Row("compiled", "bf16", method, cache) for method in (None, *methods) for cache in static],
        "torchao": [Row("torchao", "int8 (torchao)", method, cache) for method in methods for cache in static],
        "openvino": [Row("openvino", weights) for weights in (*both, "int8")],
        "openvino-genai": [Row("openvino-genai", weights) for weights in ("bf16", "int8", "int4")],
        "llama.cpp": [Row("llama.cpp", weights) for weights in ("bf16", "fp16", "4 bits (Q4_1)")],
    }
    return [row for engine in engines for row in rows[engine]]


def prepare(job: Job, rows: Sequence[Row]) -> dict[Row, Any]:
    """The run of each row of one process after a short request, or the reason why there is none."""
    import torch  # here, because the command that starts processes must not wait for it twice
    from engine_llama import request_run
    from engine_models import pretrained
    from request_models import genai_run, openvino_run, torch_run
    from rounded_weights import BF16_AND_INT8, rounded, unwrapped

    from subquad.tools.models.dtypes import TORCH

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(job.folder / "inductor"))
    torch.set_num_threads(job.threads)
    engine = rows[0].engine
    if rows[0].is_compiled:
        import torch._dynamo

        torch._dynamo.reset()  # whose number of compilations of one function is limited
    model = pretrained(job.model, job.prompt + job.new)
    makers = {"openvino": openvino_run, "openvino-genai": genai_run, "llama.cpp": request_run}
    if engine in makers:
        make = partial(makers[engine], model, job)
    else:
        models = {
            weights: model.in_dtype(TORCH[weights])
            if weights in FLOATS
            else model.with_model(rounded(model.model, BF16_AND_INT8))
            for weights in dict.fromkeys(row.weights for row in rows)
        }
        if rows[0].cache == UNGUARDED and engine == "torchao":
            unwrapped(*(each.model for each in models.values()))
        make = partial(torch_run, models, job)

    warm = np.array([[5 + number % 50 for number in range(min(WARM_PROMPT, job.prompt))]])

    def load(row: Row) -> Callable[[np.ndarray], Answer]:
        run = make(row)
        run(warm, WARM_TOKENS)
        return lambda ids: checked(run(ids, job.new), job.new)

    return {row: attempt(load, row) for row in rows}


def checked(answer: Answer, new: int) -> Answer:
    """The answer, if it has as many tokens as were asked for.

    Raises:
        EngineError: it has not.
    """
    if len(answer.tokens) != new or len(answer.seconds) != new:
        raise EngineError(f"{len(answer.tokens)} tokens and {len(answer.seconds)} times, where {new} were asked for")
    return answer


class Clock:
    """The time at which each token was there, as a streamer of `generate`."""

    def __init__(self) -> None:
        self.start, self.seconds, self.tokens = time.perf_counter(), [], []

    def put(self, value: Any) -> None:
        """Take tokens; `generate` first gives the prompt."""
        if value.ndim == 1:
            self.add(int(value[0]))

    def add(self, token: int) -> None:
        """Take one token."""
        self.seconds.append(time.perf_counter() - self.start)
        self.tokens.append(token)

    def end(self) -> None:
        """All tokens were there."""

    @property
    def answer(self) -> Answer:
        """The measurements as an answer."""
        return Answer(tuple(self.seconds), tuple(self.tokens))
