"""Backends: the implementations of the ops, and the choice of the one that runs.

`reference` is plain PyTorch, on any device: the truth. A compiled backend must equal it. A backend registers itself
(`register`), and for each op that it has it registers, in one file, why it cannot take a call (`Op.refusal`) and what
computes the op's torch operators (`Operator.on`). Nobody who calls an op names a backend.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from subquad.kernels.operators import TRACED, Operator, parameter, record

P = ParamSpec("P")
R = TypeVar("R")

# name -> returns why the backend cannot run here, or None if it can
_BACKENDS: dict[str, Callable[[], str | None]] = {"reference": lambda: None}
_forced: ContextVar[str | None] = ContextVar("subquad_backend", default=None)
_open_blocks: list[str] = []  # of `use_backend`, in all threads: what torch.compile can read


def register(name: str, refusal: Callable[[], str | None]) -> None:
    """Add a compiled backend; `refusal` returns why it cannot run on this machine, or None if it can."""
    _BACKENDS[name] = refusal


def backends() -> dict[str, str]:
    """Return each backend with "available", or the reason why it cannot run here.

    >>> backends()["reference"]
    'available'
    """
    return {name: refusal() or "available" for name, refusal in _BACKENDS.items()}


def choose(**refusals: str | None) -> str:
    """The backend for one call: of those that run here and take it the one registered last, or else "reference".

    Args:
        refusals: For each compiled backend that has the op, why it cannot take this call, or None when it can.

    Raises:
        ValueError: the backend forced by `use_backend` cannot take this call (with the reason).

    >>> choose(cpu="the tensors are on cuda:0")
    'reference'
    """
    forced = forced_backend()
    if forced is None:
        for name in reversed(_BACKENDS):
            if name in refusals and refusals[name] is None and _BACKENDS[name]() is None:
                return name
        return "reference"
    if forced != "reference":
        reason = refusals.get(forced, "it does not have this op")
        if reason is not None:
            raise ValueError(f"backend {forced!r} cannot run this call: {reason}")
    return forced


def chosen_backend() -> str:
    """The backend that ops run on now: the one forced, else the one registered last of those available."""
    return choose(**dict.fromkeys(name for name in _BACKENDS if name != "reference"))


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force one backend inside the block, in this thread or task only.

    A function compiled by `torch.compile` follows blocks too, but those of all threads: it takes the block opened last.

    Raises:
        ValueError: there is no such backend, or it cannot run here (with the reason).
    """
    if name not in _BACKENDS:
        raise ValueError(f"no backend {name!r}; there are {', '.join(_BACKENDS)}")
    reason = _BACKENDS[name]()
    if reason is not None:
        raise ValueError(f"backend {name!r} cannot run here: {reason}")
    with _forcing(name):
        yield


@contextmanager
def tracing(name: str, inside: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[None]:
    """Force a backend, also one that cannot run here, and let its functions see what compilers see: shapes.

    Inside the block an operator on meta tensors not only makes its outputs but also calls the backend's function, in a
    new context of `inside`: modes of torch that see an operator do not see what it calls.
    """
    token = TRACED.set(inside)
    try:
        with _forcing(name):
            yield
    finally:
        TRACED.reset(token)


def is_tracing() -> bool:
    """True if a block of `tracing` is open."""
    return TRACED.get() is not None


@contextmanager
def _forcing(name: str) -> Iterator[None]:
    token = _forced.set(name)
    _open_blocks.append(name)
    try:
        yield
    finally:
        del _open_blocks[len(_open_blocks) - 1 - _open_blocks[::-1].index(name)]  # the last of this name
        _forced.reset(token)


def forced_backend() -> str | None:
    """The backend that a block of `use_backend` forces now; None outside of such blocks."""
    if torch.compiler.is_compiling():  # Dynamo cannot read a ContextVar; of a global, it compiles again after a change
        return _open_blocks[-1] if _open_blocks else None
    return _forced.get()


class Op(Generic[P, R]):
    """An op: the function in plain PyTorch that it is made from, the truth, and the backends that have it too.

    The function's signature is the op's. Everything else gets the arguments by name, in one named tuple, `x`.
    """

    def __init__(self, reference: Callable[P, R]):
        functools.update_wrapper(self, reference)
        self.reference = reference
        self._parameters = inspect.signature(reference, eval_str=True).parameters
        self.arguments = record(reference.__name__, list(self._parameters.values()))
        self._refusals: dict[str, Callable[[Any], str | None]] = {}

    def refusal(self, backend: str) -> Callable[[Callable[[Any], str | None]], Callable[[Any], str | None]]:
        """Register that a backend has this op, with a function that returns why it refuses a call, or None."""

        def add(refusal: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
            self._refusals[backend] = refusal
            return refusal

        return add

    def operator(self, *names: str, **others: Any) -> Callable[[Callable[[Any], Any]], Operator]:
        """Make a torch operator from the function that allocates its outputs.

        Args:
            names: the operator's arguments, in the order of its schema: arguments of the op, or of `others`.
            others: annotations of arguments that the op does not have.
        """
        parameters = [parameter(n, others[n] if n in others else self._parameters[n].annotation) for n in names]
        return lambda outputs: Operator(outputs, parameters)

    def compiled(self, run: Callable[[str, Any], R]) -> Callable[[str, Any], R]:
        """Set what runs on compiled backends, all of them: it gets the backend's name and the arguments."""
        self._compiled = run
        return run

    def takes(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """True if a compiled backend runs here and supports this call; the one that is forced does not matter."""
        x = self.arguments(*args, **kwargs)
        return any(_BACKENDS[name]() is None and refusal(x) is None for name, refusal in self._refusals.items())

    def backend_of(self, x: Any) -> str | None:
        """The backend that `choose` gives these `arguments`, if a compiled one takes them; None if none does."""
        refusals = {name: refusal(x) for name, refusal in self._refusals.items()}
        if not any(reason is None and _BACKENDS[name]() is None for name, reason in refusals.items()):
            return None
        return choose(**refusals)

    def if_taken(self, *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Run on the backend that `choose` gives, if a compiled one takes the call; None if none does."""
        x = self.arguments(*args, **kwargs)
        backend = self.backend_of(x)
        if backend is None:
            return None
        return self.reference(*args, **kwargs) if backend == "reference" else self._compiled(backend, x)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on the backend that `choose` gives."""
        x = self.arguments(*args, **kwargs)
        backend = choose(**{name: refusal(x) for name, refusal in self._refusals.items()})
        return self.reference(*args, **kwargs) if backend == "reference" else self._compiled(backend, x)
