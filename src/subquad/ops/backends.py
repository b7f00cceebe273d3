"""Backends: the implementations of the ops, and the choice of the one that runs.

`reference` is plain PyTorch, on any device: the truth. A compiled backend must equal it. A backend registers itself
(`register`), and for each op that it has it registers, in one file, why it cannot take a call (`Op.refusal`) and what
computes the op's torch operators (`Operator.on`). Nobody who calls an op names a backend.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch.utils.flop_counter import register_flop_formula

from subquad.torch_ops import define, differentiate

P = ParamSpec("P")
R = TypeVar("R")

# name -> says why the backend cannot run here, or None when it can
_BACKENDS: dict[str, Callable[[], str | None]] = {"reference": lambda: None}
_forced: ContextVar[str | None] = ContextVar("subquad_backend", default=None)
_open_blocks: list[str] = []  # of `use_backend`, in all threads: what torch.compile can read


def register(name: str, refusal: Callable[[], str | None]) -> None:
    """Add a compiled backend; `refusal` says why it cannot run on this machine, or returns None when it can."""
    _BACKENDS[name] = refusal


def backends() -> dict[str, str]:
    """Every backend with "available", or the reason why it cannot run here.

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
    forced = _forced_now()
    if forced is None:
        taking = (name for name in reversed(_BACKENDS) if refusals.get(name, "no such op") is None)
        return next((name for name in taking if _BACKENDS[name]() is None), "reference")
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
    token = _forced.set(name)
    _open_blocks.append(name)
    try:
        yield
    finally:
        _open_blocks.remove(name)
        _forced.reset(token)


def _forced_now() -> str | None:
    if torch.compiler.is_compiling():  # Dynamo cannot read a ContextVar; of a global, it compiles again after a change
        return _open_blocks[-1] if _open_blocks else None
    return _forced.get()


class Op(Generic[P, R]):
    """An op: the function in plain PyTorch that it is made from, the truth, and the backends that have it too."""

    def __init__(self, reference: Callable[P, R]):
        functools.update_wrapper(self, reference)
        self.reference = reference
        self._refusals: dict[str, Callable[P, str | None]] = {}

    def compiled(self, run: Callable[Concatenate[str, P], R]) -> None:
        """Set what runs on compiled backends, all of them: the op's arguments behind the backend's name."""
        self._compiled = run

    def refusal(self, backend: str) -> Callable[[Callable[P, str | None]], Callable[P, str | None]]:
        """Register that a backend has this op, with what says why it cannot take a call; None when it can."""

        def add(refusal: Callable[P, str | None]) -> Callable[P, str | None]:
            self._refusals[backend] = refusal
            return refusal

        return add

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on the backend that `choose` gives."""
        backend = choose(**{name: refusal(*args, **kwargs) for name, refusal in self._refusals.items()})
        return self.reference(*args, **kwargs) if backend == "reference" else self._compiled(backend, *args, **kwargs)


class Operator:
    """A torch operator that compiled backends compute, under its name in `torch.ops.subquad`.

    Made from the function that allocates its outputs, whose annotations are the operator's schema behind a first
    argument, the backend's name. A backend's function gets the outputs, to be filled, and then the arguments.
    """

    def __init__(self, outputs: Callable[..., Any]):
        functools.update_wrapper(self, outputs)
        self.name, self.outputs = outputs.__name__, outputs
        self._computed: dict[str, Callable[..., Any]] = {}
        self._run = define(self.name, self._compute, outputs, first="str backend")

    def __call__(self, backend: str, *args: Any) -> Any:
        """Compute the outputs on this backend."""
        return self._run(backend, *args)

    def _compute(self, backend: str, *args: Any) -> Any:
        outputs = self.outputs(*args)
        self._computed[backend](outputs, *args)
        return outputs

    def on(self, backend: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register what fills the outputs on a backend."""

        def add(compute: Callable[..., Any]) -> Callable[..., Any]:
            self._computed[backend] = compute
            return compute

        return add

    def gradient(self, backward: Callable[..., Any], save: Callable[..., Any]) -> None:
        """Set the gradient; both get what `torch.library.register_autograd` gives them."""
        differentiate(self.name, backward, save)

    def not_differentiable(self, of: str) -> None:
        """Let a derivative of this operator, which is itself the gradient of `of`, raise with the remedy."""

        def raises(ctx: Any, *_: Any) -> None:
            raise NotImplementedError(
                f"the gradient of {of} in compiled code cannot be differentiated again; for second derivatives run the "
                "forward pass on plain PyTorch, `with sq.use_backend('reference'), torch.nn.attention.sdpa_kernel("
                "torch.nn.attention.SDPBackend.MATH):`"
            )

        differentiate(self.name, raises)

    def flops(self, count: Callable[..., int]) -> None:
        """Set how many operations of products `torch.utils.flop_counter.FlopCounterMode` counts, from the shapes."""
        packet = getattr(torch.ops.subquad, self.name)
        register_flop_formula([packet])(lambda backend, *args, **_: count(*args))
